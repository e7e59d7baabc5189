"""What training and generation need on hardware that this machine lacks: they are compiled for that hardware, on a CPU.

Begin with planner.py, for generation with generation.py; fitting.py chooses what a step keeps in memory, topology.py lists the hardware, hlo.py and memory_traffic.py read the compiled program, result.py has the finished plan, report.py prints it.
May import cost, build, config, training and everything below them.
"""
