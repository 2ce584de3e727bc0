# MM-LDLM in a container, on the CPU:   docker build -t mmldlm . && docker run --rm mmldlm demo
# With CUDA:                            docker build --build-arg TORCH=cuda -t mmldlm .   (docker run --gpus all)
# Training: --shm-size=8g gives loader processes their shared memory, -v "$PWD":/work keeps data and runs (--user "$(id -u)" if
# that folder belongs to somebody else than user 1000).
# Serving:  docker run -p 8000:8000 -e MMLDLM_TOKEN=SECRET -v "$PWD":/work mmldlm serve saved/NAME --host 0.0.0.0
FROM python:3.11-slim

ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# PyTorch first: it is most of the image and changes least. Versions are those of constraints.txt.
WORKDIR /opt/mmldlm
COPY constraints.txt ./
RUN if [ "$TORCH" = cpu ]; then index="--extra-index-url=https://download.pytorch.org/whl/cpu"; fi && \
    pip install -c constraints.txt ${index:+"$index"} torch

COPY pyproject.toml README.md LICENSE ./
COPY packages packages
COPY src src
RUN pip install -c constraints.txt '.[demo,serve]' ./packages/*

RUN useradd --create-home --uid 1000 user && mkdir /work && chown 1000 /work
ENV HOME=/home/user
USER 1000
WORKDIR /work
ENTRYPOINT ["mmldlm"]
CMD ["--help"]
