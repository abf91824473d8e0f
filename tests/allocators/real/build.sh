#!/bin/sh
# Builds the stub of CUDA into a folder: build.sh FOLDER [PYTHON]. Needs gcc, and a CUDA build of PyTorch in PYTHON's
# environment for the headers of the runtime (triton brings them).
set -e
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
inc=$(dirname "$("${2:-python}" -c 'import triton; print(triton.__file__)')")/backends/nvidia/include
gcc -w -I"$inc" -shared -fPIC -o "$1/libstub_cuda.so" "$here/stub_cuda.c" "$here/stub_libraries.c" -ldl
cp "$1/libstub_cuda.so" "$1/libcuda.so.1"
cp "$1/libstub_cuda.so" "$1/libnvidia-ml.so.1"
