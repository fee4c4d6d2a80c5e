"""Readable forms of a plan or trace: text, HTML, pictures, and files for other tools. Imports no torch."""
