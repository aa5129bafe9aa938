#include "cuda/jit.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <tuple>
#include <unordered_map>

#include "core/expect.h"
#include "core/hash.h"
#include "cuda/cubin_cache.h"
#include "cuda/kernel_pack.h"
#include "cuda/library.h"
#include "cuda/nvrtc.h"
#include "halfbyte/version.hpp"

namespace halfbyte::cuda {
namespace {

// Null where no file is named so.
const EmbeddedFile* find_file(std::span<const EmbeddedFile> files, std::string_view name) {
  const auto name_of = [](const EmbeddedFile& file) { return std::string_view(file.name); };
  const auto found = std::ranges::lower_bound(files, name, {}, name_of);
  return found != files.end() && found->name == name ? &*found : nullptr;
}

const EmbeddedFile& embedded_file(std::string_view name) {
  const EmbeddedFile* file = find_file(embedded_files(), name);
  HALFBYTE_CHECK(file != nullptr, bug, "no embedded file is named {}", name);
  return *file;
}

// The names in the lines `#include "name"` of a text.
std::vector<std::string_view> included_names(std::string_view text) {
  constexpr std::string_view kInclude = "include";
  std::vector<std::string_view> names;
  const auto skip_blanks = [](std::string_view& line) {
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  };
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    skip_blanks(line);
    if (!line.starts_with('#')) continue;
    line.remove_prefix(1);
    skip_blanks(line);
    if (!line.starts_with(kInclude)) continue;
    line.remove_prefix(kInclude.size());
    skip_blanks(line);
    if (!line.starts_with('"')) continue;
    line.remove_prefix(1);
    if (const size_t quote = line.find('"'); quote != line.npos) names.push_back(line.substr(0, quote));
  }
  return names;
}

std::vector<std::string> compile_options(std::string_view architecture) {
  std::vector<std::string> options = {fmt::format("--gpu-architecture={}", architecture), "--std=c++20",
                                      "--fmad=false", "-default-device"};
  if (environment("HALFBYTE_LINE_INFO") == "1") options.emplace_back("--generate-line-info");
  return options;
}

// Names all that decides the bytes of a cubin.
std::string cache_key(const Nvrtc& nvrtc, const KernelSpec& spec, const std::string& target) {
  struct stat status = {};  // the version has no patch level; the size of the file tells builds apart
  ::stat(nvrtc.path.c_str(), &status);
  return fmt::format("NVRTC {} of {} bytes\ntarget {}\nsource {} {}\nfunction {}\n{}",
                     version_text(nvrtc.version), status.st_size, target, spec.source,
                     sources_hash(spec.source, spec.config), spec.function, spec.config);
}

// Modules are never unloaded. Returns what the driver says.
CUresult load_function(const std::vector<char>& cubin, const std::string& name, CUfunction& function) {
  const Driver& cuda = driver();
  CUmodule module = nullptr;
  if (const CUresult result = cuda.cuModuleLoadData(&module, cubin.data()); result != 0) return result;
  const CUresult result = cuda.cuModuleGetFunction(&function, module, name.c_str());
  if (result != 0) cuda.cuModuleUnload(module);
  return result;
}

// Null on a miss. What the driver refuses as no code for the device is one too: it is compiled again and
// replaced.
CUfunction load_cached(const std::string& key, const KernelSpec& spec) {
  const auto cubin = CubinCache::instance().load(key);
  CUfunction function = nullptr;
  if (!cubin) return nullptr;
  const CUresult result = load_function(*cubin, spec.function, function);
  // CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_PTX, INVALID_SOURCE, NOT_FOUND
  for (const CUresult refusal : {200, 209, 218, 300, 500})
    if (result == refusal) return nullptr;
  check(result, "cuModuleLoadData");
  return function;
}

// Null where no pack has it. What the driver refuses is an error: the user has named the pack.
CUfunction load_packed(const Context& context, const KernelSpec& spec) {
  const std::optional<PackedKernel> packed = find_packed(spec, context.target);
  CUfunction function = nullptr;
  if (!packed) return nullptr;
  if (const CUresult result = load_function(packed->cubin, spec.function, function); result != 0)
    check(result,
          fmt::format("cuda:{}: loading {} of kernel pack \"{}\", compiled for {}, with a driver for CUDA {}",
                      context.index, spec.function, packed->pack, context.target,
                      version_text(driver().version))
              .c_str());
  return function;
}

CUfunction load_kernel(const Context& context, const KernelSpec& spec) {
  const Scope scope(context);
  if (CUfunction function = load_packed(context, spec)) return function;
  const Nvrtc& compiler = find_nvrtc();
  const std::string problem = problem_with(compiler, context.target);
  HALFBYTE_CHECK(
      problem.empty(), device,
      "cuda:{}: kernel {} is in no loaded kernel pack and cannot be compiled: {}. Either install an NVRTC "
      "(HALFBYTE_NVRTC may give its path), or load a pack that has the kernel (HALFBYTE_KERNEL_PACK; "
      "halfbyte precompile --arch {} makes one). Its configuration:\n{}",
      context.index, spec.function, problem, context.target, spec.config);
  const std::string key = cache_key(compiler, spec, context.target);
  if (CUfunction function = load_cached(key, spec)) return function;
  const std::shared_ptr<void> lock = CubinCache::instance().lock(key);
  if (CUfunction function = load_cached(key, spec)) return function;  // another process was faster

  const Compilation compilation = compile(spec, context.target);
  CUfunction function = nullptr;
  const CUresult result = load_function(compilation.code, spec.function, function);
  if (result != 0)
    check(result,
          fmt::format("cuda:{}: loading {} of {}, compiled for {} by NVRTC {}, with a driver for CUDA {}",
                      context.index, spec.function, spec.source, context.target,
                      version_text(compiler.version), version_text(driver().version))
              .c_str());
  CubinCache::instance().store(key, compilation.code);
  return function;
}

// A kernel on one device, in the memory of the process.
struct LoadedKernel {
  std::mutex mutex;  // held by the thread that loads it
  std::atomic<CUfunction> function = nullptr;
};
using Key = std::tuple<int, KernelSpec>;  // the index of the device, the kernel
using KeyView = std::tuple<int, const KernelSpec&>;
struct KeyHash {
  using is_transparent = void;
  size_t operator()(const KeyView& key) const {
    const auto& [index, spec] = key;
    const std::hash<std::string_view> hash;
    return hash(spec.config) +
           31 * (hash(spec.function) + 31 * (hash(spec.source) + static_cast<size_t>(index)));
  }
};

LoadedKernel& kernel_in_memory(int index, const KernelSpec& spec) {
  static auto& mutex = *new std::shared_mutex;
  static auto& kernels = *new std::unordered_map<Key, LoadedKernel, KeyHash, std::equal_to<>>;
  {
    const std::shared_lock lock(mutex);
    if (const auto found = kernels.find(KeyView(index, spec)); found != kernels.end()) return found->second;
  }
  KernelSpec kept = spec;
  kept.source = embedded_file(spec.source).name;  // which lives for ever
  const std::unique_lock lock(mutex);
  return kernels[Key(index, std::move(kept))];
}

struct Program {
  const Nvrtc& compiler;
  nvrtcProgram handle = nullptr;
  ~Program() { compiler.nvrtcDestroyProgram(&handle); }
};

}  // namespace

CUfunction get_kernel(const Context& context, const KernelSpec& spec) {
  LoadedKernel& kernel = kernel_in_memory(context.index, spec);
  if (CUfunction function = kernel.function.load(std::memory_order_acquire)) return function;
  const std::scoped_lock lock(kernel.mutex);
  CUfunction function = kernel.function.load(std::memory_order_relaxed);
  if (!function) {
    function = load_kernel(context, spec);
    kernel.function.store(function, std::memory_order_release);
  }
  return function;
}

std::vector<const EmbeddedFile*> reached_files(std::span<const EmbeddedFile> files, std::string_view source,
                                               std::string_view config) {
  std::vector<const EmbeddedFile*> reached;
  const auto add = [&](std::string_view name) {
    if (const EmbeddedFile* file = find_file(files, name); file && std::ranges::count(reached, file) == 0)
      reached.push_back(file);
  };
  add(source);
  for (const std::string_view name : included_names(config)) add(name);
  for (size_t i = 0; i < reached.size(); ++i)
    for (const std::string_view name : included_names(reached[i]->text)) add(name);
  std::ranges::sort(reached);  // as in `files`
  return reached;
}

std::string sources_hash(std::span<const EmbeddedFile> files, std::string_view source,
                         std::string_view config) {
  std::string text = fmt::format("halfbyte {}\noptions {}\n", kVersion, fmt::join(compile_options(""), " "));
  for (const EmbeddedFile* file : reached_files(files, source, config))
    text += fmt::format("{} {}\n{}", file->name, file->text.size(), file->text);
  return hash_hex(text);
}

std::string sources_hash(std::string_view source, std::string_view config) {
  static auto& mutex = *new std::mutex;
  static auto& hashes = *new std::unordered_map<std::string, std::string>;
  std::string roots(source);
  for (const std::string_view name : included_names(config))
    if (find_file(embedded_files(), name)) (roots += '\n') += name;
  const std::scoped_lock lock(mutex);
  if (const auto found = hashes.find(roots); found != hashes.end()) return found->second;
  return hashes.emplace(roots, sources_hash(embedded_files(), source, config)).first->second;
}

Compilation compile(const KernelSpec& spec, const std::string& target, const CompileOptions& options) {
  const Nvrtc& compiler = nvrtc();
  const std::string problem = problem_with(compiler, target);
  HALFBYTE_CHECK(problem.empty(), device, "{}", problem);
  const EmbeddedFile& source = embedded_file(spec.source);
  std::vector<const char*> names = {"halfbyte_config.h"}, texts = {spec.config.c_str()};
  for (const EmbeddedFile* file : reached_files(embedded_files(), spec.source, spec.config)) {
    if (file == &source) continue;
    names.push_back(file->name);
    texts.push_back(file->text.data());
  }
  const auto check_nvrtc = [&](nvrtcResult result, const char* what, const std::string& log = "") {
    HALFBYTE_CHECK_AS(result == 0, device, ErrorDetails{ErrorKind::compilation_failed},
                      "{} for {}: {} of NVRTC {} ({}): {}{}{}", spec.source, target, what,
                      version_text(compiler.version), compiler.path, compiler.nvrtcGetErrorString(result),
                      log.empty() ? "" : "\n", log);
  };
  Program program{compiler};
  check_nvrtc(compiler.nvrtcCreateProgram(&program.handle, source.text.data(), source.name,
                                          static_cast<int>(names.size()), texts.data(), names.data()),
              "nvrtcCreateProgram");
  // PTX is for the virtual architecture of a target: compute_90a of sm_90a.
  const std::string number = target.substr(target.find('_'));
  std::vector<std::string> words = compile_options((options.ptx ? "compute" : "sm") + number);
  if (options.verbose) words.emplace_back("--ptxas-options=-v");
  std::vector<const char*> word_texts;
  for (const std::string& word : words) word_texts.push_back(word.c_str());
  const nvrtcResult result =
      compiler.nvrtcCompileProgram(program.handle, static_cast<int>(word_texts.size()), word_texts.data());
  Compilation compilation;
  size_t num_bytes = 0;
  if (compiler.nvrtcGetProgramLogSize(program.handle, &num_bytes) == 0 && num_bytes > 1) {
    compilation.log.resize(num_bytes);  // with a 0 byte at its end
    compiler.nvrtcGetProgramLog(program.handle, compilation.log.data());
    compilation.log.pop_back();
  }
  constexpr nvrtcResult kCompilationError = 6;
  constexpr size_t kMaxLogBytes = 4096;  // of an error: the first lines tell
  HALFBYTE_CHECK_AS(result != kCompilationError, bug, ErrorDetails{ErrorKind::compilation_failed},
                    "{} does not compile for {} with NVRTC {}:\n{}\nwith\n{}", spec.source, target,
                    version_text(compiler.version), compilation.log.substr(0, kMaxLogBytes), spec.config);
  check_nvrtc(result, "nvrtcCompileProgram", compilation.log.substr(0, kMaxLogBytes));
  const auto get_size = options.ptx ? compiler.nvrtcGetPTXSize : compiler.nvrtcGetCUBINSize;
  const auto get_code = options.ptx ? compiler.nvrtcGetPTX : compiler.nvrtcGetCUBIN;
  check_nvrtc(get_size(program.handle, &num_bytes), "the size of the code");
  compilation.code.resize(num_bytes);
  check_nvrtc(get_code(program.handle, compilation.code.data()), "the code");
  if (options.ptx && !compilation.code.empty()) compilation.code.pop_back();  // a 0 byte
  return compilation;
}

}  // namespace halfbyte::cuda
