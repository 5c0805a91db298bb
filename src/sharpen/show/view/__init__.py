"""`sharpen view`: a local web page over run directories, during a run and after it."""
