"""The setting of torch's CUDA allocator, which it reads from the environment when CUDA starts."""

import pytest

from moefold.launch.threads_and_malloc import expand_segments


def test_segments_expand_where_the_user_set_nothing():
    environment: dict[str, str] = {}
    expand_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_setting_of_the_user_stays(name):
    environment = {name: "max_split_size_mb:64"}
    expand_segments(environment)
    assert environment == {name: "max_split_size_mb:64"}
