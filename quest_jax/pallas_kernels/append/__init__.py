"""The op ``append``: ``op.py`` is the public function, ``reference.py`` its plain-JAX specification."""
