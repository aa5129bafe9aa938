// The CUDA kernels of the library: a list of them, their code as PTX or cubin, and packs of them for machines
// without NVRTC (docs/kernels.md). Nothing here needs a GPU. Functions that compile need NVRTC.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "halfbyte/export.h"

namespace halfbyte {

// A property that a kernel is specialised on: its name, which is also an option of the tool (--group-size),
// and its values.
struct KernelKey {
  std::string name;                 // "group-size"
  std::vector<std::string> values;  // the first is the default; "no", "yes": a flag
  bool open = false;                // other values are taken too, as `description` says
  std::string description;          // a sentence
  // The value in a configuration that does not give one: the first, or "" if none is listed.
  std::string default_value() const { return values.empty() ? "" : values.front(); }
};

struct KernelInfo {
  std::string op;    // "quantize"
  std::string name;  // "quantize_groups": the extern "C" function
  std::string description;
  std::vector<KernelKey> keys;
  std::string target = "";  // the only target that the kernel is for: "sm_90a"; empty: any target
};

// Keys and values. A missing key has its default.
using KernelConfig = std::vector<std::pair<std::string, std::string>>;

// Every kernel, op by op. The list does not change while the process lives.
HALFBYTE_API const std::vector<KernelInfo>& all_kernels();
// The kernel of the op that runs for this configuration. Throws Error(usage) for an unknown op, and for a
// configuration that none of its kernels takes. If the op has several kernels and the configuration does not
// choose one, throws Error(usage) naming them.
HALFBYTE_API const KernelInfo& choose_kernel(std::string_view op, const KernelConfig& config);

// The targets that the NVRTC of this machine compiles for: "sm_75", "sm_90", "sm_90a", "sm_100f", ... Throws
// Error(device) without NVRTC.
HALFBYTE_API const std::vector<std::string>& kernel_targets();

// One module with one kernel: PTX as text, or the machine code of the target. Thread safe; a process compiles
// one kernel at a time. Throws Error(usage) for an unknown kernel, key, value or target, naming the known
// ones, and for a target that the kernel is not for. Throws Error(device) without NVRTC.
HALFBYTE_API std::string emit_ptx(std::string_view kernel, const KernelConfig& config,
                                  std::string_view target);
HALFBYTE_API std::vector<std::byte> emit_cubin(std::string_view kernel, const KernelConfig& config,
                                               std::string_view target);

// --- Kernel packs: files of compiled kernels, which take the place of NVRTC.

struct KernelPackOptions {
  std::vector<std::string> targets;          // of kernel_targets(); at least one
  std::vector<std::string> ops;              // empty: all
  std::vector<std::string> formats, dtypes;  // of kernels that have these keys; empty: all
  bool force = false;                        // replace an existing file
  // To share the work: only every num_shards-th kernel, from number `shard` on.
  int shard = 0, num_shards = 1;
  // Called after each kernel. Return false to cancel: Error(cancelled), and no file is left.
  std::function<bool(int64_t done, int64_t total)> progress;
};
// How many kernels a pack of these options holds: every kernel in all its configurations, except those for
// lut4, which contain the user's table. Throws Error(usage) for unknown words, naming the known ones, and if
// no kernel is left.
HALFBYTE_API int64_t count_pack_kernels(const KernelPackOptions& options);

struct KernelPackReport {
  int64_t num_kernels = 0;
  int64_t num_compiled = 0;  // the others were in loaded packs
  uint64_t num_bytes = 0;    // of the file
};
// Writes the file `path` complete or not at all. Takes kernels from loaded packs and compiles the others, on
// the calling thread. Throws Error(usage) as above, Error(device) without NVRTC, Error(exists) and Error(io).
HALFBYTE_API KernelPackReport write_kernel_pack(const std::string& path, const KernelPackOptions& options);

struct KernelPackInfo {
  std::string path;
  std::string version;  // of the library that wrote it
  int64_t num_kernels = 0;
  int64_t num_matching = 0;          // made from the sources of this library; only these are used
  std::vector<std::string> targets;  // of all its kernels
};
// Loads a pack. From now on, kernels are looked for in it before they are compiled, so later calls on a
// device that it has kernels for need no NVRTC. The file stays open until the process ends. A pack is machine
// code: do not load one that somebody else could have written. Thread safe. Throws Error(io),
// Error(bad_input) if the file is not a pack, and Error(corrupt) if it is damaged. The same holds for packs
// that HALFBYTE_KERNEL_PACK names.
HALFBYTE_API KernelPackInfo load_kernel_pack(const std::string& path);
// All loaded packs. First come those that the environment variable HALFBYTE_KERNEL_PACK names, as one or more
// paths separated by ':'. If one of these cannot be used, this function throws as load_kernel_pack does, and
// so does every call that needs a CUDA device.
HALFBYTE_API std::vector<KernelPackInfo> loaded_kernel_packs();

}  // namespace halfbyte
