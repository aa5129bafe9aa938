// From the text of a kernel to a loaded function: memory cache, kernel packs, disk cache, NVRTC.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver.h"
#include "cuda/embedded.h"

namespace halfbyte::cuda {

// A kernel and its specialisation.
struct KernelSpec {
  std::string_view source;  // name of an embedded file
  std::string function;     // extern "C" in it
  std::string config;       // text of "halfbyte_config.h": named types and constants
  bool operator==(const KernelSpec&) const = default;
};

// The function, loaded on the device. The first call for a spec takes it from a loaded kernel pack, else from
// the disk cache, else compiles it; later ones find it in memory. Thread safe: one thread loads, the others
// wait for it. Throws Error(device) where no pack has it and NVRTC is missing or too old for the device; as
// KernelPack where a pack is damaged; Error(bug) with the log where the source does not compile.
CUfunction get_kernel(const Context& context, const KernelSpec& spec);

// The source, and what it and the config include, transitively by lines `#include "name"`, in the order of
// `files`, which are sorted by name. NVRTC gets no other, so an include that is overlooked here does not
// compile. Names that no file has are left out.
std::vector<const EmbeddedFile*> reached_files(std::span<const EmbeddedFile> files, std::string_view source,
                                               std::string_view config);

// Names all that decides the bytes of a kernel but target, function, config and compiler: the version of the
// library, the options, and the files that source and config reach. The first: of `files`; the second: of
// embedded_files(), remembered. Thread safe.
std::string sources_hash(std::span<const EmbeddedFile> files, std::string_view source,
                         std::string_view config);
std::string sources_hash(std::string_view source, std::string_view config);

// What get_kernel does on a miss of all caches, needs NVRTC only: for tests and offline compilation.
struct CompileOptions {
  bool ptx = false;      // instead of machine code
  bool verbose = false;  // with what ptxas says
};
struct Compilation {
  std::vector<char> code;
  std::string log;
};
Compilation compile(const KernelSpec& spec, const std::string& target, const CompileOptions& options = {});

}  // namespace halfbyte::cuda
