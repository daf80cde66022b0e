"""Distributions of document lengths: the shipped histograms have the published moments, and bad files are refused."""

import numpy as np
import pytest

from moefold.errors import ConfigError
from moefold.planner.lengths.distribution import LengthHistogram, ListedLengths, histogram_names, load_distribution

FRACTIONS = (np.arange(100_000) + 0.5) / 100_000
PUBLISHED = {
    "wikipedia": {"mean": 1014, 50: 347, 90: 2112, 99: 10921, 99.9: 37367},
    "wlb": {"mean": 3962, 50: 3227, 90: 5784, 99: 26070, 99.9: 119836},
    "prolong": {"mean": 3052, 50: 1914, 90: 6051, 99: 16273, 99.9: 47500},
}
"""Mean and percentiles of the original lengths. The histogram has only classes."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_histogram_has_the_published_mean_and_percentiles(name):
    lengths = load_distribution(name).quantile(FRACTIONS)
    published = dict(PUBLISHED[name])
    assert lengths.mean() == pytest.approx(published.pop("mean"), rel=0.02)
    found = {percent: np.percentile(lengths, percent) for percent in published}
    assert found == pytest.approx(published, rel=0.08)


def test_the_shipped_histograms():
    assert histogram_names() == ("magi", "prolong", "wikipedia", "wlb")
    for name in histogram_names():
        histogram = load_distribution(name)
        assert isinstance(histogram, LengthHistogram)
        assert "arXiv" in histogram.source or "repository" in histogram.source
        lengths = histogram.quantile(FRACTIONS)
        assert (np.diff(lengths) >= 0).all()
        assert lengths.min() >= 1
        assert lengths.max() < histogram.upper[-1]
        edges = [0, *histogram.upper]
        shares = np.histogram(lengths, edges)[0] / len(lengths)
        assert shares == pytest.approx(np.array(histogram.documents) / sum(histogram.documents), abs=1e-4)


TOKENS = {
    "wikipedia": [0.2489, 0.1538, 0.1674, 0.1553, 0.1234, 0.0758, 0.0447, 0.0197, 0.0112],
    "wlb": [0.0207, 0.0611, 0.2481, 0.4457, 0.0291, 0.0256, 0.0418, 0.1280],
    "prolong": [0.0417, 0.1855, 0.2538, 0.2648, 0.1510, 0.0544, 0.0207, 0.0115, 0.0166],
}
"""Published shares of the tokens by class."""


def test_documents_of_a_class_are_as_frequent_as_the_power_of_their_length():
    for name, shares in TOKENS.items():
        histogram = load_distribution(name)
        assert isinstance(histogram, LengthHistogram)
        means = PUBLISHED[name]["mean"] * np.array(shares) / histogram.documents
        lows = [1, *histogram.upper[:-1]]
        for low, high, exponent, mean in zip(lows, histogram.upper, histogram.exponents, means, strict=True):
            lengths = np.linspace(low, high, 200_001)
            # Relative to the end of the greater density, so that no power overflows.
            density = (lengths / (low if exponent < 0 else high)) ** exponent
            assert (lengths * density).sum() / density.sum() == pytest.approx(mean, rel=1e-3)
    # Uniform density: the mean is the middle. Log-uniform density: (high - low) / ln(high / low).
    for exponent, mean in ((0.0, 200.5), (-1.0, 399 / np.log(400))):
        histogram = LengthHistogram("", "", (400,), (1.0,), (exponent,))
        assert histogram.quantile(FRACTIONS).mean() == pytest.approx(mean - 0.5, rel=1e-3)


def test_a_list_is_drawn_by_rank(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("3\n\n 1 \n2\n")
    listed = load_distribution(str(path))
    assert isinstance(listed, ListedLengths)
    assert listed.quantile(np.array([0.0, 0.34, 0.99])).tolist() == [1, 2, 3]


BAD_FILES = [
    ("0\n", "lengths.txt", "line 1: '0' is no length"),
    ("12\n-3\n", "lengths.txt", "line 2: '-3' is no length"),
    ("1.5\n", "lengths.txt", "line 1: '1.5' is no length"),
    ("1e3\n", "lengths.txt", "line 1: '1e3' is no length"),
    ("²\n", "lengths.txt", "line 1: '²' is no length"),
    ("9" * 30 + "\n", "lengths.txt", "is no length"),
    ("\n\n", "lengths.txt", "has no length"),
    ("upper = [", "lengths.toml", "not TOML"),
    ("upper = [10]\n", "lengths.toml", "documents missing"),
    ("upper = [10, 5]\ndocuments = [1, 1]\n", "lengths.toml", "upper must be ascending integers"),
    ("upper = [10.5]\ndocuments = [1]\n", "lengths.toml", "upper must be ascending integers"),
    ("upper = [10]\ndocuments = [0]\n", "lengths.toml", "and one above 0"),
    ("upper = [10]\ndocuments = [-1]\n", "lengths.toml", "documents.0=-1 must be greater than or equal to 0"),
    ("upper = [10]\ndocuments = [1, 2]\n", "lengths.toml", "each of the 1 classes"),
    ("upper = [10]\ndocuments = [nan]\n", "lengths.toml", "documents.0=nan must be a finite number"),
    ("upper = [10]\ndocuments = [true]\n", "lengths.toml", "documents.0=True must be a valid number"),
    ("upper = [10]\ndocuments = [1]\nlengths = 3\n", "lengths.toml", "unknown key 'lengths'"),
    ("upper = [10]\ndocuments = [1]\nsource = 3\n", "lengths.toml", "source=3 must be text"),
    ("upper = [10]\ndocuments = [1]\ntokens = [1]\n", "lengths.toml", "unknown key 'tokens'"),
    ("upper = [10]\ndocuments = [1]\nexponents = [1, 2]\n", "lengths.toml", "one number for each of the 1 classes"),
    ("upper = [10]\ndocuments = [1]\nexponents = [201]\n", "lengths.toml", "exponents.0=201 must be"),
    ("upper = [10]\ndocuments = [1]\nexponents = ['x']\n", "lengths.toml", "exponents.0='x' must be"),
]


@pytest.mark.parametrize(("text", "name", "message"), BAD_FILES)
def test_a_bad_file_is_refused(tmp_path, text, name, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_distribution(str(path))
    assert message in str(error.value)
    assert "--lengths" in str(error.value)


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'wikipedia'"):
        load_distribution("wikipedai")
    binary = tmp_path / "lengths.bin"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no text"):
        load_distribution(str(binary))
