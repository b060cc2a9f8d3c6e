# `nextscale serve` in a container; docs/serving.md has the commands that build and run it.
#
#     docker build --target cpu -t nextscale:cpu .
#     docker build --target cuda -t nextscale:cuda .
#
# No package index is named here: --build-arg PIP_INDEX_URL=... and PIP_EXTRA_INDEX_URL=... choose others than pip's own.

# The package alone, so that an image holds neither its sources nor what builds it.
FROM python:3.12-slim AS wheel
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
WORKDIR /opt/source
COPY pyproject.toml setup.py README.md LICENSE NOTICE MODEL_CARD.md ./
COPY src src
RUN python -m pip wheel --no-deps --wheel-dir /opt/wheel .

# What the package needs, in a layer that a change of its sources leaves alone.
FROM python:3.12-slim AS base
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /opt/nextscale
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        extras = p['optional-dependencies']; \
        print(*p['dependencies'], *extras['serve'], *extras['text'], sep='\n')" > requirements.txt \
    && python -m pip install -r requirements.txt -c constraints.txt
RUN useradd --uid 1000 --create-home nextscale && install --directory --owner=nextscale /opt/cache
ENV HF_HOME=/opt/cache/huggingface TRITON_CACHE_DIR=/opt/cache/triton
VOLUME /opt/cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# A GPU is warmed up for minutes before /health says 200. No proxy of the environment is asked.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "from http.client import HTTPConnection; c = HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]

FROM base AS cuda
# Triton compiles a launcher in C when a kernel runs for the first time.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=type=bind,from=wheel,source=/opt/wheel,target=/opt/wheel \
    python -m pip install --no-deps /opt/wheel/*.whl
USER 1000
ENTRYPOINT ["nextscale", "serve", "--host", "0.0.0.0", "--device", "cuda", "--runtime", "graphs"]

FROM base AS cpu
RUN --mount=type=bind,from=wheel,source=/opt/wheel,target=/opt/wheel \
    python -m pip install --no-deps /opt/wheel/*.whl
USER 1000
ENTRYPOINT ["nextscale", "serve", "--host", "0.0.0.0", "--device", "cpu"]
