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
  // Its parameters are pointers and numbers, which describe_kernel() tells: a kernel for other programs,
  // which the library itself does not run. Its name and parameters change with the major version only. Other
  // kernels take a struct that belongs to this version of the library.
  bool plain = false;
};

// Keys and values. A missing key has its default.
using KernelConfig = std::vector<std::pair<std::string, std::string>>;

// Every kernel, op by op. The list does not change while the process lives.
HALFBYTE_API const std::vector<KernelInfo>& all_kernels();
// The kernel of the op for this configuration: the plain one if it takes the configuration, else one that the
// library runs. Of ops without a plain kernel: the one that the op would choose, or that takes the most.
// Throws Error(usage) for an unknown op, and for a configuration that none of these takes.
HALFBYTE_API const KernelInfo& choose_kernel(std::string_view op, const KernelConfig& config);

// How a plain kernel is launched. Formulas are of the kernel's numbers, by name: integers, + - * and / (which
// rounds toward zero), parentheses, min(a, b) and max(a, b).
struct KernelParameter {
  std::string name;  // "codes"
  std::string type;  // "i32", "i64", "f64"; of a pointer what lies there: "u8", "f16", ...
  // Pointers: how many elements of `type` lie there, a formula. Numbers: empty.
  std::string elements;
  std::string access;     // pointers: "read", "written", "read and written"
  bool optional = false;  // the pointer may be null
  std::string description;
  bool is_pointer() const { return !elements.empty(); }
  // Of the address, the size of an element; of a number, its size: it lies in the buffer of parameters at a
  // multiple of that. Pointers take 8 bytes there.
  int64_t alignment() const;
};
struct KernelDescription {
  std::string op, kernel;
  KernelConfig config;                      // complete
  std::vector<KernelParameter> parameters;  // in the order of the kernel
  std::string grid;      // blocks along x; along y and z: 1. Any other number is right, too
  int block = 0;         // threads along x; along y and z: 1
  int shared_bytes = 0;  // of dynamic shared memory
};
// Throws Error(usage) as emit_ptx does, and for kernels that are not plain.
HALFBYTE_API KernelDescription describe_kernel(std::string_view kernel, const KernelConfig& config);
// As JSON, which docs/kernels.md describes.
HALFBYTE_API std::string to_json(const KernelDescription& description);

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
  std::vector<std::string> targets = {};               // of kernel_targets(); at least one
  std::vector<std::string> ops = {};                   // empty: all
  std::vector<std::string> formats = {}, dtypes = {};  // of kernels that have these keys; empty: all
  bool force = false;                                  // replace an existing file
  // To share the work: only every num_shards-th kernel, from number `shard` on.
  int shard = 0, num_shards = 1;
  // Called after each kernel. Return false to cancel: Error(cancelled), and no file is left.
  std::function<bool(int64_t done, int64_t total)> progress = {};
};
// How many kernels a pack of these options holds: every kernel but plain ones in all its configurations,
// except those for lut4, which contain the user's table. Throws Error(usage) for unknown words, naming the
// known ones, and if no kernel is left.
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
// code: one that somebody else could have written, by the owners and modes of the file and its directory, is
// refused (docs/kernels.md). Thread safe. Throws Error(io), also where it is refused so, Error(bad_input) if
// the file is not a pack, and Error(corrupt) if it is damaged. The same holds for packs that
// HALFBYTE_KERNEL_PACK names.
HALFBYTE_API KernelPackInfo load_kernel_pack(const std::string& path);
// All loaded packs. First come those that the environment variable HALFBYTE_KERNEL_PACK names, as one or more
// paths separated by ':'. If one of these cannot be used, this function throws as load_kernel_pack does, and
// so does every call that needs a CUDA device.
HALFBYTE_API std::vector<KernelPackInfo> loaded_kernel_packs();

}  // namespace halfbyte
