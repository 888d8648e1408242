# The image of the CSI driver: fusefs-csi and fusefs in /opt/fusefs, on Debian with its own Python
# and libfuse (for the pyfuse3 session). What compiles stays in the build stage.
#
#     docker build --tag registry.example.com/fusefs-csi:0.1.0 .
#
# Everything is pinned: the base by its digest, Python packages by version and hash
# (image/*.txt; image/README.md says how they are made), Debian's by their upstream version, so
# that a security revision does not break the build.
FROM debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171 AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates=20* \
        libfuse3-3=3.14.* \
        python3=3.11.* \
        tini=0.19.* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 65532 --no-create-home --shell /usr/sbin/nologin fusefs

FROM base AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        gcc=4:12.* \
        libc6-dev=2.36-* \
        libfuse3-dev=3.14.* \
        pkg-config=1.8.* \
        python3-dev=3.11.* \
        python3-venv=3.11.* \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY image/build.txt image/requirements.txt image/
RUN python3 -m venv /build \
    && /build/bin/pip install --no-cache-dir --require-hashes -r image/build.txt \
    && /build/bin/pip wheel --no-cache-dir --no-build-isolation --require-hashes \
        --wheel-dir /wheels -r image/requirements.txt
COPY pyproject.toml setup.py README.md ./
COPY proto proto
COPY fusefs fusefs
COPY csi csi
RUN /build/bin/pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels . \
    && python3 -m venv --without-pip /opt/fusefs \
    && /build/bin/pip --python /opt/fusefs/bin/python install --no-cache-dir --no-index \
        --no-deps /wheels/*.whl

FROM base
LABEL org.opencontainers.image.title="fusefs-csi" \
      org.opencontainers.image.description="CSI driver that gives S3 buckets to pods"
COPY --from=build /opt/fusefs /opt/fusefs
ENV PATH=/opt/fusefs/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# The controller's user. The manifests give root to the two containers that need it.
USER 65532:65532
# PID 1 adopts what keepers leave behind, and must collect it.
ENTRYPOINT ["/usr/bin/tini", "--", "fusefs-csi"]
