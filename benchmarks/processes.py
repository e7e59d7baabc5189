"""The processes that a campaign disturbs."""

import psutil


def working_children(process: psutil.Process) -> list[psutil.Process]:
    """The descendants of a process, without multiprocessing's resource tracker, which does no work.

    Raises `psutil.NoSuchProcess` if one ends meanwhile.
    """
    children = process.children(recursive=True)
    return [one for one in children if "resource_tracker" not in " ".join(one.cmdline())]
