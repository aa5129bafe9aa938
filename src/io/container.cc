#include "io/container.h"

#include <algorithm>

namespace halfbyte::io {
namespace {

constexpr Container kPickle = {"a pickle, as torch.save writes (.bin, .pt, .pth)",
                               "reading one can run code that it brings, so halfbyte does not: load it in "
                               "transformers, and save_pretrained writes safetensors"};
constexpr Container kGguf = {"a GGUF file",
                             "take the safetensors that it was made from, or load it in transformers with "
                             "gguf_file=, which makes it dense, and save_pretrained"};
constexpr Container kHdf5 = {"an HDF5 file, as Keras writes (.h5)",
                             "load it in transformers with from_tf=True, and save_pretrained"};
constexpr Container kOnnx = {"an ONNX model", "take the safetensors that it was exported from"};
constexpr Container kMsgpack = {"a file of Flax (.msgpack)",
                                "load it in transformers with from_flax=True, and save_pretrained"};
constexpr Container kLfsPointer = {"a pointer of Git LFS, not the file itself",
                                   "run git lfs pull where it was cloned"};

struct Magic {
  std::string_view bytes;
  const Container* container;
};
// No safetensors file begins so: as the length of a header, these bytes are too large.
constexpr Magic kMagics[] = {{"GGUF", &kGguf},        {std::string_view("PK\x03\x04", 4), &kPickle},
                             {"\x80\x02", &kPickle},  {"\x80\x03", &kPickle},
                             {"\x80\x04", &kPickle},  {"\x80\x05", &kPickle},
                             {"\x89HDF\r\n", &kHdf5}, {"version ", &kLfsPointer}};

struct Ending {
  std::string_view text;
  const Container* container;
};
constexpr Ending kEndings[] = {{".bin", &kPickle},  {".pt", &kPickle},      {".pth", &kPickle},
                               {".ckpt", &kPickle}, {".gguf", &kGguf},      {".h5", &kHdf5},
                               {".onnx", &kOnnx},   {".msgpack", &kMsgpack}};

}  // namespace

const Container* container_of_bytes(std::string_view bytes) {
  const auto* found = std::ranges::find_if(kMagics, [&](auto& row) { return bytes.starts_with(row.bytes); });
  return found == std::end(kMagics) ? nullptr : found->container;
}

const Container* container_of_name(std::string_view name) {
  const auto* found = std::ranges::find_if(kEndings, [&](auto& row) { return name.ends_with(row.text); });
  return found == std::end(kEndings) ? nullptr : found->container;
}

}  // namespace halfbyte::io
