"""Words that look like source text, of which the benchmarks make their texts."""

WORDS = (
    "def",
    "class",
    "return",
    "import",
    "self",
    "value",
    "name",
    "for",
    "in",
    "(",
    ")",
    ":",
    "\n",
)
