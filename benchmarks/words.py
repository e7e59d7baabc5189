"""Words of which the benchmarks make texts that look like source code."""

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
