"""JAX's persistent compilation cache, so that a command compiles a program only the first time."""

import hashlib
import os
import pathlib
import platform

from calm_jax.parallel.cpu import extensions
from calm_jax.parallel.host_memory import return_compilers_memory

# Programs that compile in less time than this are not cached.
_LEAST_SECONDS = 0.2


def set_up_compiler() -> None:
    """To be called by a command before its first program: keeps compiled programs, and returns the compiler's memory."""
    keep_compiled_programs()
    return_compilers_memory()


def keep_compiled_programs() -> None:
    """Turns the compilation cache on, in the user's cache folder, unless the user has set JAX's options for it.

    JAX_COMPILATION_CACHE_DIR=DIR puts it elsewhere; JAX_ENABLE_COMPILATION_CACHE=false turns it off.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        path = folder()
    except RuntimeError:
        # A user without a home folder, as in some containers.
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)


def folder() -> pathlib.Path:
    """`calm_jax` in the user's cache folder, and there one folder for each kind of CPU.

    A compiled program uses instructions that CPUs of another kind may lack, which JAX does not check when machines of
    different kinds share a home folder.
    """
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "calm_jax" / "compiled" / _cpu()


def _cpu() -> str:
    """A name for the kind of CPU: the machine's architecture, and on Linux a hash of the instructions that it has."""
    names = " ".join(extensions())
    return f"{platform.machine()}-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
