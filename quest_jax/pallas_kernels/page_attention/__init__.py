"""The op ``page_attention``: ``op.py`` is the public function, ``reference.py`` its plain-JAX specification."""
