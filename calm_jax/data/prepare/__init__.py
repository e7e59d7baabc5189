"""Prepares large text as shards of tokens, with many processes: `python -m calm_jax.data.prepare`.

Begin with preparation.py, which makes a whole folder of prepared text.
  options       the command's options and input files
  scan          the first pass: counts documents, finds copies, and decides where shards begin
  make_shards   the second pass: tokenises, and writes shards and their index
  cluster       runs both on Dask workers, and shows progress
May import the other modules of calm_jax.data.
"""
