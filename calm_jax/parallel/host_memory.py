"""Host memory where only CPUs compute: the allocator keeps freed memory, so that no training step pays for fresh pages."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform

# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Makes glibc's malloc keep freed memory for the rest of this process.

    XLA allocates the temporaries of a compiled program anew for each call. glibc returns allocations of this size to
    the operating system when they are freed. Each training step would then touch hundreds of MiB of fresh pages, which
    the kernel has to clear first: about a fifth of a small step's time. The process stays at its peak memory instead.

    To be called before JAX starts its threads, because threads keep the memory arenas that they began with.

    Returns:
        Whether malloc was changed: False without glibc, and where JAX may find an accelerator, whose host needs its
        memory for other things.
    """
    if platform.libc_ver()[0] != "glibc" or not computes_on_cpus():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # One arena, because the others return large blocks; no mmap for large blocks; never trim the heap.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))
    return all([mallopt(parameter, value) for parameter, value in settings])


def computes_on_cpus() -> bool:
    """Whether JAX will use CPUs: the environment says so, or no plugin for an accelerator is installed."""
    chosen = os.environ.get("JAX_PLATFORMS", "")
    if chosen:
        return chosen == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    modules = ("libtpu", "jax_plugins")
    return not plugins and not any(importlib.util.find_spec(name) for name in modules)
