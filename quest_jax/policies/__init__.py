"""Methods of page selection, one a file."""
