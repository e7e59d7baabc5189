"""Training: one loop for every task.

Begin with loop.py; step.py is one update, optimizer.py AdamW and its schedules; checkpoint.py saves and restores, and
checkpoint_files.py knows the folders. log.py writes metrics, events.py those for TensorBoard, and norms.py computes some of them.
checksums.py finds damage in checkpoints; late_errors.py works around a library. May import evaluation, tasks and everything
below them, but no model: a `Task` has the model and its loss.
"""
