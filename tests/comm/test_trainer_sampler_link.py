"""Messages between the ranks of a job."""

from datetime import timedelta

import torch.distributed as dist

from moefold.comm.trainer_sampler_link import JobLink, JobSplit


def test_a_message_may_take_longer_than_a_collective():
    """The watchdog ends a job without progress; torch's timeout of a receive would end one with a long round."""
    link = JobLink.connect(JobSplit(1, 0), 0, dist.HashStore())
    assert link._handle.options._timeout >= timedelta(days=1)
