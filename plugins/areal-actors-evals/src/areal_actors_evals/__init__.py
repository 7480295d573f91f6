"""Evaluations of models behind a URL, and the check that dumped rows are what the engine answered."""
