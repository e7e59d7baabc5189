"""Host memory where only CPUs compute: malloc keeps the memory that training steps free, and returns what the compiler frees."""

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform

# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
# The event of jax.monitoring at the end of a compilation, and the seconds of one that took much memory.
_COMPILED = "/jax/core/compile/backend_compile_duration"
_LONG_COMPILATION = 0.5


def keep_freed_memory() -> bool:
    """Makes glibc's malloc keep freed memory for the rest of this process.

    XLA allocates the temporaries of a compiled program anew for each call. glibc returns allocations of this size to
    the operating system when they are freed. Each training step would then touch hundreds of MiB of fresh pages, which
    the kernel has to clear first: about a fifth of a small step's time. The process keeps its peak memory instead, but for the
    compiler's (`return_compilers_memory`).

    To be called before JAX starts its threads, because threads keep the memory arenas that they began with.

    Returns:
        Whether malloc was changed: False without glibc, and where JAX may find an accelerator, whose host needs its
        memory for other things.
    """
    if not _keeps():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # One arena, because the others return large blocks; no mmap for large blocks; never trim the heap.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))
    return all([mallopt(parameter, value) for parameter, value in settings])


@functools.cache
def return_compilers_memory() -> None:
    """Gives freed memory back to the operating system after each long compilation, where `keep_freed_memory` keeps it.

    The compiler frees as much memory as a small training step needs, but in pieces too small for the step's large blocks. All
    freed memory is given back, so that the next step touches its pages anew.
    """
    if not _keeps():
        return
    import jax

    trim = ctypes.CDLL(None).malloc_trim

    def after(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILED and duration_secs > _LONG_COMPILATION:
            trim(ctypes.c_size_t(0))

    jax.monitoring.register_event_duration_secs_listener(after)


def _keeps() -> bool:
    """Whether `keep_freed_memory` changes malloc."""
    return platform.libc_ver()[0] == "glibc" and computes_on_cpus()


def computes_on_cpus() -> bool:
    """Whether JAX will use CPUs: the environment says so, or no plugin for an accelerator is installed."""
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if chosen:
        return chosen == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    modules = ("libtpu", "jax_plugins")
    return not plugins and not any(importlib.util.find_spec(name) for name in modules)
