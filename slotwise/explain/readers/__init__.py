"""Log readers, one per dialect, and the registry that picks one for each file."""
