"""From text to batches of token ids: corpus (files to documents), tokenizers, pipeline (documents to batches)."""
