"""Print what vLLM needs beside torch, to install it with the build of torch that is there; run by `make test-vllm`."""

from importlib.metadata import requires
from sys import argv

from pip._vendor.packaging.requirements import Requirement

# of sounds and films; their builds ask for a build of torch of their own
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec")

for line in requires(argv[1]) or ():
    needed = Requirement(line)
    if needed.name not in LEFT_OUT and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        extras = "[" + ",".join(sorted(needed.extras)) + "]" if needed.extras else ""
        print(f"{needed.name}{extras}{needed.specifier}")
