"""The op ``token_scores``: ``op.py`` is the public function, ``reference.py`` its plain-JAX specification."""
