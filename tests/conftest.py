"""What every test shares: the CPU backend, run-time checks of all array annotations, repeatable property tests."""

import os

# Before anything imports jax: an installed CUDA or TPU plugin must not probe for its device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jaxtyping
import pytest

# Before the first import of quest_jax: every annotation of the library is checked on every call of every test.
jaxtyping.install_import_hook("quest_jax", "beartype.beartype")

# No deadline: the first example compiles. Derandomized: a failure seen once is seen by everyone; explore with
# `--hypothesis-profile=explore`.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture
def as_a_user():
    """Switches the annotation checks off, as they are for users: what then raises is the library's own message."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
