"""A run: everything that happens in one workdir.

Begin with recipe.py: it trains both stages, scores them and writes samples. preflight.py checks, before a long run, all that
can be checked; workdir.py reads and writes the folder; dataset.py packs the text for each stage; generator.py,
continuous_batch.py and continuation.py turn prompts into text. report.py prints the tables; web_report.py writes
report.html from the files that run_files.py reads, and web_comparison.py a page that compares runs (web_page.py and charts.py
are their parts). references.py, systems.py and harness.py are for scores beside other models: positions, samples and the table of
`calm_jax.brierlm`, and tasks of lm-evaluation-harness. This folder may import every folder below it, from planning and build down.
"""
