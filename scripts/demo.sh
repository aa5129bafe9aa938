#!/usr/bin/env bash
# From a clean clone to a quantized checkpoint: installs what is missing, builds, quantizes the model in
# examples/, and shows what it cost in accuracy.
source "$(dirname "$0")/lib.sh"

install_packages "${packages[@]}"

say "Building"
cmake --preset release
cmake --build --preset release --target halfbyte_cli

halfbyte=build/release/halfbyte
model=examples/tiny-llama
output=build/demo/tiny-llama-nf4
mkdir -p build/demo

run() {
  say "$*"
  "$@"
}
run "$halfbyte" quantize "$model" -o "$output" --format nf4 --force
run "$halfbyte" inspect "$output"
run "$halfbyte" compare "$model" "$output"

say "A checkpoint in the layout of bitsandbytes, which transformers loads: $output"
ls -l "$output"
