// The codecs compile for every GPU generation: NVRTC turns each format of formats.def into machine code,
// without a toolkit header, a GPU or a driver, and no kernel needs a stack frame or spills a register.
// NVRTC is looked for as users have it; without one the tests are skipped, but fail where CI is set.
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <utility>
#include <vector>

namespace {

namespace fs = std::filesystem;

// One kernel per format, element type and scale rule: a thread quantizes a group of 64 and reads it back.
constexpr const char* kProgram = R"(
#include "formats/all.h"

using namespace halfbyte::formats;

#define ROLLED _Pragma("unroll 1")  // unrolled, the loops of 80 kernels take long to compile

constexpr Codec make_codec(Kind kind, Rule rule, int bits, bool asymmetric, const CodeBook& book) {
  Codec codec;
  codec.kind = kind;
  codec.rule = rule;
  codec.scale_type = ScaleType::f16;
  codec.bits = static_cast<u8>(bits);
  codec.asymmetric = asymmetric;
  codec.q_min = -(1 << (bits - 1));
  codec.q_max = (1 << (bits - 1)) - 1;
  codec.book = book;
  return codec;
}

template <class F>
__device__ void round_trip(const F* x, u8* codes, void* scales, void* biases, u8* zeros, F* y, const Codec& codec) {
  const i64 group = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x;
  x += group * 64;
  y += group * 64;
  codes += group * packed_bytes(64, codec.bits);
  F low = x[0], high = x[0];
  ROLLED for (int i = 1; i < 64; ++i) {
    low = min(low, x[i]);
    high = max(high, x[i]);
  }
  const GroupParams<F> params = group_params(low, high, codec);
  store_scale(scales, group, params.scale, codec.scale_type);
  store_scale(biases, group, params.bias, codec.scale_type);
  zeros[group] = static_cast<u8>(params.zero_point - codec.q_min);
  ROLLED for (int i = 0; i < 63; ++i) put_code(codes, i, codec.bits, encode(x[i], params, codec));
  put_code(codes, 63, codec.bits, zero_code(params, codec));
  const F scale = load_scale<F>(scales, group, codec.scale_type);
  const F bias = load_scale<F>(biases, group, codec.scale_type);
  ROLLED for (int i = 0; i < 64; ++i)
    y[i] = decode(get_code(codes, i, codec.bits), scale, bias, zeros[group] + codec.q_min, codec);
}

#define KERNEL(name, F, ...)                                                                                \
  constexpr Codec name##_codec = make_codec(__VA_ARGS__);                                                  \
  extern "C" __global__ void name(const F* x, u8* codes, void* scales, void* biases, u8* zeros, F* y) {    \
    round_trip(x, codes, scales, biases, zeros, y, name##_codec);                                          \
  }
#define KERNELS(name, ...) KERNEL(name##_f32, float, __VA_ARGS__) KERNEL(name##_f64, double, __VA_ARGS__)

#define table_KERNELS(name, bits) KERNELS(name, Kind::table, Rule::absmax, bits, false, books::name)
#define integer_KERNELS(name, bits)                                                        \
  KERNELS(name##_absmax, Kind::integer, Rule::absmax, bits, false, CodeBook{})             \
  KERNELS(name##_half_range, Kind::integer, Rule::half_range, bits, false, CodeBook{})     \
  KERNELS(name##_signed_max, Kind::integer, Rule::signed_max, bits, false, CodeBook{})     \
  KERNELS(name##_asymmetric, Kind::integer, Rule::minmax, bits, true, CodeBook{})
#define affine_KERNELS(name, bits)                                                         \
  KERNELS(name##_minmax, Kind::affine, Rule::minmax, bits, false, CodeBook{})              \
  KERNELS(name##_mlx_edge, Kind::affine, Rule::mlx_edge, bits, false, CodeBook{})
#define floating_KERNELS(name, bits) KERNELS(name, Kind::floating, Rule::absmax, bits, false, CodeBook{})
#define HALFBYTE_FORMAT(name, kind, bits, default_rule, scales, group) kind##_KERNELS(name, bits)
#include "halfbyte/formats.def"

extern "C" __global__ void pack(const u64* x, u64* y) {
  const i64 i = threadIdx.x;
  for (int bits = 2; bits <= 8; ++bits) y[i] += unpack8(pack8(x[i], bits), bits);
}

extern "C" __global__ void convert(const double* x, double* y) {
  const i64 i = threadIdx.x;
  const float f = static_cast<float>(x[i]);
  y[i] = f16_to_f32(to_f16(f)) + bf16_to_f32(to_bf16(f)) + f16_to_f32(to_f16(x[i])) + bf16_to_f32(to_bf16(x[i])) +
         e4m3_to_f32(to_e4m3(f)) + e4m3_to_f32(to_e4m3(x[i])) + e8m0_to_f32(to_e8m0(f)) + e8m0_to_f32(to_e8m0(x[i]));
}
)";

// What nvrtc.h declares, as far as it is used here.
struct Nvrtc {
  using Program = void*;
  int (*version)(int*, int*) = nullptr;
  int (*create_program)(Program*, const char*, const char*, int, const char* const*,
                        const char* const*) = nullptr;
  int (*compile_program)(Program, int, const char* const*) = nullptr;
  int (*get_program_log_size)(Program, size_t*) = nullptr;
  int (*get_program_log)(Program, char*) = nullptr;
  int (*get_cubin_size)(Program, size_t*) = nullptr;
  int (*destroy_program)(Program*) = nullptr;

  bool load(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    return library && find(library, "nvrtcVersion", version) &&
           find(library, "nvrtcCreateProgram", create_program) &&
           find(library, "nvrtcCompileProgram", compile_program) &&
           find(library, "nvrtcGetProgramLogSize", get_program_log_size) &&
           find(library, "nvrtcGetProgramLog", get_program_log) &&
           find(library, "nvrtcGetCUBINSize", get_cubin_size) &&
           find(library, "nvrtcDestroyProgram", destroy_program);
  }

 private:
  template <class Function>
  static bool find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }
};

// The first NVRTC among: HALFBYTE_NVRTC, the loader's path, CUDA_HOME, /usr/local/cuda; null if none.
const Nvrtc* find_nvrtc() {
  static Nvrtc nvrtc;
  static const bool found = [] {
    std::vector<std::string> paths;
    if (const char* path = std::getenv("HALFBYTE_NVRTC")) paths.push_back(path);
    for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) paths.push_back(name);
    if (const char* home = std::getenv("CUDA_HOME"))
      paths.push_back(std::string(home) + "/lib64/libnvrtc.so");
    paths.push_back("/usr/local/cuda/lib64/libnvrtc.so");
    return std::any_of(paths.begin(), paths.end(), [](const std::string& path) { return nvrtc.load(path); });
  }();
  return found ? &nvrtc : nullptr;
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Include name and text of formats.def, every header of src/formats, and one that includes them all.
std::vector<std::pair<std::string, std::string>> headers() {
  const fs::path root = HALFBYTE_SOURCE_DIR;
  std::vector<std::pair<std::string, std::string>> result;
  std::string all;
  for (const auto& entry : fs::directory_iterator(root / "src/formats")) {
    if (entry.path().extension() != ".h") continue;
    const std::string name = "formats/" + entry.path().filename().string();
    result.emplace_back(name, read_file(entry.path()));
    all += fmt::format("#include \"{}\"\n", name);
  }
  result.emplace_back("formats/all.h", all);
  result.emplace_back("halfbyte/formats.def", read_file(root / "include/halfbyte/formats.def"));
  return result;
}

class FormatsNvrtc : public testing::TestWithParam<const char*> {};

TEST_P(FormatsNvrtc, compiles_every_format) {
  const Nvrtc* nvrtc = find_nvrtc();
  if (!nvrtc) {
    if (std::getenv("CI")) FAIL() << "no NVRTC found; set HALFBYTE_NVRTC to the path of libnvrtc.so.13";
    GTEST_SKIP() << "no NVRTC found";
  }
  int major = 0, minor = 0;
  ASSERT_EQ(nvrtc->version(&major, &minor), 0);

  std::vector<const char*> names, texts;
  const auto named_texts = headers();
  for (const auto& [name, text] : named_texts) {
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  Nvrtc::Program program = nullptr;
  ASSERT_EQ(nvrtc->create_program(&program, kProgram, "formats.cu", static_cast<int>(names.size()),
                                  texts.data(), names.data()),
            0);
  const std::string architecture = std::string("--gpu-architecture=") + GetParam();
  const std::vector<const char*> options = {architecture.c_str(), "--std=c++20", "--fmad=false",
                                            "-default-device", "--ptxas-options=-v"};
  const int error = nvrtc->compile_program(program, static_cast<int>(options.size()), options.data());
  size_t log_bytes = 0, cubin_bytes = 0;
  nvrtc->get_program_log_size(program, &log_bytes);
  std::string log(log_bytes, '\0');
  nvrtc->get_program_log(program, log.data());
  log.resize(std::strlen(log.c_str()));
  nvrtc->get_cubin_size(program, &cubin_bytes);
  nvrtc->destroy_program(&program);

  ASSERT_EQ(error, 0) << "NVRTC " << major << "." << minor << "\n" << log;
  EXPECT_GT(cubin_bytes, 0u);
  EXPECT_EQ(log.find("warning"), std::string::npos) << log;
  // One line per kernel: "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads".
  const std::regex memory("(\\d+) bytes stack frame, (\\d+) bytes spill stores, (\\d+) bytes spill loads");
  int num_kernels = 0;
  for (std::sregex_iterator match(log.begin(), log.end(), memory), end; match != end; ++match, ++num_kernels)
    EXPECT_EQ(match->str(), "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads")
        << match->prefix().str().substr(0, 200);
  EXPECT_GT(num_kernels, 60) << log;
}

INSTANTIATE_TEST_SUITE_P(, FormatsNvrtc,
                         testing::Values("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
