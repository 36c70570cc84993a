# UniTrain on CPUs, with MPI and Horovod. From the top of the repository:
#   docker build --file docker/cpu.Dockerfile --tag unitrain:cpu .

FROM debian:12.11-slim AS build

# Open MPI starts nothing without ssh, not even on its own host.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make openssh-client python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# The largest part, so in a layer that a change of the source leaves alone. With an index of CPU-only builds as
# PIP_EXTRA_INDEX_URL it is several GB smaller.
ARG TORCH_VERSION=2.15.0
ARG TORCHVISION_VERSION=0.29.2
ARG PIP_EXTRA_INDEX_URL=
RUN pip install --no-cache-dir torch==$TORCH_VERSION torchvision==$TORCHVISION_VERSION

WORKDIR /src
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[recipes,mpi,horovod-build]'
# The cache outlives the build, so that Horovod is compiled again only when torch or MPI has changed.
RUN --mount=type=cache,target=/var/cache/unitrain UNITRAIN_CACHE=/var/cache/unitrain unitrain install-horovod


FROM debian:12.11-slim

# ssh is how mpirun and horovodrun reach other hosts. The keys that the package makes would be those of every container.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 10001 unitrain \
    && install --directory --owner unitrain --mode 700 /keys /home/unitrain/runs
COPY docker/ssh/sshd.conf /etc/ssh/sshd_config.d/unitrain.conf
COPY docker/ssh/ssh.conf /etc/ssh/ssh_config.d/unitrain.conf
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

USER 10001
WORKDIR /home/unitrain
COPY recipes recipes
CMD ["unitrain", "doctor"]
