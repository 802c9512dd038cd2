# The program with torch for CPUs, as a normal user. It is not built in CI, and was not built so far.
#
#     docker build --tag scale-surgery .
#     docker run --rm scale-surgery                                                        # the demo
#     docker run --rm --volume "$PWD:/home/user/work" --workdir /home/user/work --user "$(id -u)" \
#         scale-surgery scale-surgery inspect MODEL

FROM python:3.11-slim

WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY scale_surgery scale_surgery
# a release of torch for CPUs, such as 2.13.0+cpu, is newer to pip than that of the package index, which is for CUDA
RUN PIP_CONSTRAINT=constraints.txt pip install --no-cache-dir \
        --extra-index-url https://download.pytorch.org/whl/cpu . \
    && rm -r /source/scale_surgery

RUN useradd --create-home user
USER user
WORKDIR /home/user
# any user can write caches there
ENV HF_HOME=/tmp/huggingface MPLCONFIGDIR=/tmp/matplotlib

CMD ["scale-surgery", "demo"]
