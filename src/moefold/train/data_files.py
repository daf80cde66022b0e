"""The files of a run's data, as all ranks see them."""

from moefold.config.schema import DataConfig
from moefold.data.fingerprint import fingerprint, outline, outline_differences
from moefold.errors import ConfigError, some
from moefold.launch.crew import Crew


def agree_on_files(data: DataConfig, crew: Crew) -> dict[str, str]:
    """What the files look like to the first rank, which alone reads of them; collective over the crew.

    Raises:
        ConfigError: another rank sees other files, or leaves other ones out as corrupt; on every rank alike.
    """
    found: dict[str, str] = crew.gather(fingerprint(data) if crew.is_first else {})[0]
    wrong = [] if crew.is_first else outline_differences(found, outline(data))
    for rank, differences in enumerate(crew.gather(wrong)):
        if differences:
            raise ConfigError(
                f"rank {rank} sees other data than rank 0: {some(differences)}; give all machines the same files"
            )
    return found
