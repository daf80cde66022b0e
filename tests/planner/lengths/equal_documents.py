"""Samples whose documents all have one length."""

from moefold.planner.lengths.samples import DocumentSamples, RecordedSamples


def equal_documents(seq_len: int, length: int) -> DocumentSamples:
    """Return samples whose documents all have one length, which divides `seq_len`."""
    assert seq_len % length == 0, (seq_len, length)
    return RecordedSamples(f"{length} tokens", "equal documents", ((length,) * (seq_len // length),))
