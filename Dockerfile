# An image with moefold for job files (`moefold template`), with the CUDA libraries that torch brings:
#   docker build -t moefold .
# For CPUs, with an index that has CPU-only wheels of torch:
#   docker build -t moefold:cpu --build-arg DEVICE=cpu --build-arg TORCH_ARGS="--index-url URL" .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
ARG DEVICE=cuda
ARG TORCH_ARGS=""
ENV PATH=/opt/moefold/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
RUN case "$DEVICE" in cuda | cpu) ;; *) echo "DEVICE=$DEVICE must be cuda or cpu" >&2; exit 2 ;; esac
RUN python -m venv /opt/moefold
# Torch first: a change of moefold does not download it again.
RUN pip install ${TORCH_ARGS} 'torch>=2.11,<2.14'
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY recipes recipes
RUN extras=hf,serve,tensorboard; if [ "$DEVICE" = cuda ]; then extras="$extras,gpu"; fi; pip install ".[$extras]"

FROM python:${PYTHON}-slim-bookworm
# gcc compiles the CPU kernels, and the launchers of Triton's kernels, at the first run.
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/moefold /opt/moefold
RUN useradd --create-home --uid 1000 moefold
USER moefold
WORKDIR /home/moefold
ENV PATH=/opt/moefold/bin:$PATH PYTHONUNBUFFERED=1
# The build fails where torch cannot be imported; the CPU kernels are compiled.
RUN moefold doctor
CMD ["moefold", "--help"]
