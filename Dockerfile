# MM-LDLM in a container, on the CPU:   docker build -t mmldlm . && docker run --rm mmldlm demo
# With CUDA:                            docker build --build-arg TORCH=cuda -t mmldlm .
# Training: --shm-size=8g gives loader processes their shared memory, -v "$PWD":/work keeps data and runs.
FROM python:3.12-slim

ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

RUN if [ "$TORCH" = cpu ]; then pip install torch --index-url https://download.pytorch.org/whl/cpu; else pip install torch; fi

WORKDIR /opt/mmldlm
COPY pyproject.toml README.md LICENSE ./
COPY packages packages
COPY src src
RUN pip install ./packages/runwatch ./packages/traindoctor '.[demo]'

RUN useradd --create-home user && mkdir /work && chown user /work
USER user
WORKDIR /work
ENTRYPOINT ["mmldlm"]
CMD ["--help"]
