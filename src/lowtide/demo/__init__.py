"""The demonstration behind ``lowtide demo``: train a byte-level GPT-2 on the standard library's sources, twice."""
