// What the tests of the CUDA runtime run in processes of their own: a process loads a driver and NVRTC once.
//
//   cuda_child info                     what cuda_info() says
//   cuda_child kernels N CONFIG...      gets the kernel of each CONFIG from N threads, prints the hashes of
//   the stub
//   cuda_child load PACK CONFIG...      the same, one thread, once the pack is loaded
//   cuda_child pack PACK TARGET CONFIG...  writes a pack of such kernels
//   cuda_child memory BYTES             allocates, copies there and back
//   cuda_child matmul                   products by cuBLASLt: how many were right
//   cuda_child stream                   what comes of each call with a stream of another device
//   cuda_child shapes                   products of several shapes that share a kernel, by turns
//   cuda_child sticky                   an error that the device keeps, then everything else
//
// An Error is printed; its code is the exit code.
#include <fmt/format.h>

#include <barrier>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "benchmark/problem.h"
#include "cuda/jit.h"
#include "cuda/kernel_pack.h"
#include "cuda/launch.h"
#include "cuda/matmul.h"
#include "formats/convert.h"
#include "halfbyte/communicator.hpp"
#include "halfbyte/device.hpp"
#include "halfbyte/error.hpp"
#include "halfbyte/observe.hpp"
#include "halfbyte/qgemm.hpp"

namespace {

using namespace halfbyte;

constexpr Device kDevice{DeviceKind::cuda, 0};

cuda::KernelSpec spec_of(const std::string& config) {
  for (const cuda::EmbeddedFile& file : cuda::embedded_files())
    if (std::string_view(file.name).ends_with(".cu")) return {file.name, "kernel", config};
  throw Error(ErrorCode::bug, "no .cu is embedded");
}

int report(const std::function<void()>& body) {
  try {
    body();
    return 0;
  } catch (const Error& error) {
    fmt::print("{}: {}\n", to_string(error.code()), error.what());
    return static_cast<int>(error.code());
  }
}

void info() {
  const CudaInfo info = cuda_info();
  fmt::print("problem {}\ndriver {} {}\nnvrtc {} {}\n", info.problem, info.driver_path, info.driver_version,
             info.nvrtc_path, info.nvrtc_version);
  for (const CudaDevice& device : info.devices)
    fmt::print("device {} {} {} {} {} {} {}\n", device.index, device.name, device.capability, device.target,
               device.num_multiprocessors, device.memory_bytes, device.problem);
  fmt::print("cache {} {}\n", info.cache_directory, info.cache_problem);
}

int kernels(int num_threads, const std::vector<std::string>& configs) {
  std::vector<uint64_t> hashes(configs.size());
  std::vector<int> codes(static_cast<size_t>(num_threads));
  std::barrier start(num_threads);
  std::vector<std::jthread> threads;
  for (int t = 0; t < num_threads; ++t)
    threads.emplace_back([&, t] {
      start.arrive_and_wait();
      codes[static_cast<size_t>(t)] = report([&] {
        for (size_t i = 0; i < configs.size(); ++i) {
          const size_t which = (i + static_cast<size_t>(t)) % configs.size();
          const auto function = cuda::get_kernel(cuda::context(0), spec_of(configs[which]));
          if (t == 0) std::memcpy(&hashes[which], static_cast<const void*>(function), sizeof hashes[which]);
        }
      });
    });
  threads.clear();
  for (const int code : codes)
    if (code != 0) return code;
  for (const uint64_t hash : hashes) fmt::print("{:016x}\n", hash);
  return 0;
}

void write_pack(const std::string& path, const std::string& target, const std::vector<std::string>& configs) {
  std::ofstream file(path, std::ios::binary);
  cuda::KernelPackWriter writer([&](uint64_t offset, std::string_view bytes) {
    file.seekp(static_cast<std::streamoff>(offset))
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  });
  for (const std::string& config : configs) {
    const std::vector<char> cubin = cuda::compile(spec_of(config), target).code;
    writer.add(spec_of(config), target, {cubin.data(), cubin.size()});
  }
  writer.finish();
}

void memory(int64_t num_bytes) {
  const Memory there(kDevice, num_bytes);
  const Memory from = Memory::host(kDevice, num_bytes), back = Memory::host(kDevice, num_bytes);
  std::memset(from.data(), 42, static_cast<size_t>(num_bytes));
  const Stream stream(kDevice);
  copy(kDevice, there.data(), from.data(), num_bytes, stream.handle());
  copy(kDevice, back.data(), there.data(), num_bytes, stream.handle());
  stream.synchronize();
  fmt::print("same {}\n", std::memcmp(from.data(), back.data(), static_cast<size_t>(num_bytes)) == 0);
}

// Every kind of product, of small integers: exact. What lies between the rows of y stays as it is.
void matmul() {
  const cuda::Context& context = cuda::context(0);
  if (const std::string problem = cuda::refuse_matmul(context); !problem.empty())
    throw Error(ErrorCode::device, problem);
  std::mt19937_64 random(std::random_device{}());
  const auto values = [&](int64_t count) {
    std::vector<uint16_t> result(static_cast<size_t>(count));
    for (uint16_t& value : result)
      value = formats::to_bf16(static_cast<double>(static_cast<int>(random() % 9) - 4));
    return result;
  };
  int num_right = 0;
  for (const bool by_rows : {false, true})
    for (const bool bias : {false, true}) {
      constexpr int64_t kM = 5, kN = 7, kK = 11;
      cuda::MatmulShape shape{.m = kM, .n = kN, .k = kK, .by_rows = by_rows};
      shape.x_stride = kK + 1;
      shape.w_stride = (by_rows ? kN : kK) + 2;
      shape.y_stride = kN + 3;
      shape.bias = bias;
      const std::vector<uint16_t> x = values(kM * shape.x_stride), w = values(kK * kN + 2 * (kK + kN)),
                                  b = values(kN), before = values(kM * shape.y_stride);
      std::vector<uint16_t> y = before, expected = before;
      const auto at = [](const std::vector<uint16_t>& of, int64_t i) {
        return formats::bf16_to_f32(of[static_cast<size_t>(i)]);
      };
      for (int64_t i = 0; i < kM; ++i)
        for (int64_t j = 0; j < kN; ++j) {
          float sum = bias ? at(b, j) : 0;
          const int64_t place = i * shape.y_stride + j;
          for (int64_t l = 0; l < kK; ++l)
            sum += at(x, i * shape.x_stride + l) *
                   at(w, by_rows ? l * shape.w_stride + j : j * shape.w_stride + l);
          expected[static_cast<size_t>(place)] = formats::to_bf16(static_cast<double>(sum));
        }
      cuda::Matmul(context, shape, 1 << 20).run(x.data(), w.data(), b.data(), y.data(), nullptr, nullptr);
      num_right += y == expected;
    }
  fmt::print("{} right\n", num_right);
}

// Everything that takes a stream, on cuda:0, with a stream of cuda:1.
void stream() {
  const Stream other({DeviceKind::cuda, 1});
  void* const handle = other.handle();
  const auto try_call = [](const std::string& name, const std::function<void()>& call) {
    fmt::print("{}: ", name);
    if (report(call) == 0) fmt::print("is done\n");
  };

  // Every op that is measured: its first problem. Nothing is at the addresses.
  std::set<std::string> ops;
  for (const auto problems :
       {quantize_problems, dequantize_problems, reorder_problems, quantize_linear_problems,
        fake_quantize_problems, learned_scale_problems, observe_problems, affine_qdq_problems})
    for (const BenchProblem& problem : problems(DeviceKind::cuda)) {
      if (!ops.insert(problem.op).second) continue;
      uintptr_t address = 1 << 20;
      std::vector<std::byte*> arrays;
      for (const BenchProblem::Array& array : problem.arrays) {
        arrays.push_back(reinterpret_cast<std::byte*>(address));
        address += static_cast<uintptr_t>(array.num_bytes / 256 + 1) * 256;
      }
      const BenchRun run = problem.bind({kDevice, arrays}, {});
      const Memory workspace(kDevice, run.workspace_bytes);
      try_call(problem.op, [&] { run.run(handle, workspace); });
    }

  const Tensor x(kDevice, DType::bf16, {2, 64}), y(kDevice, DType::bf16, {2, 64});
  const Tensor min(kDevice, DType::f32, {}), max(kDevice, DType::f32, {}), scale(kDevice, DType::f32, {});
  const auto qparams = ComputeQParamsPlan::select(kDevice, {});
  const Memory workspace(kDevice, 1 << 20);
  try_call("compute_qparams", [&] {
    qparams.run(handle, workspace, {.min = min.view(), .max = max.view(), .scale = scale.view()});
  });
  try_call("status", [&] { qparams.status(handle, workspace); });

  const PackedTensor w({}, 64, 64, kDevice);
  const auto product =
      QgemmPlan::select(kDevice, {.spec = w.view().spec, .m = 2, .n = 64, .k = 64, .variant = "qgemm_simt"});
  try_call("qgemm",
           [&] { product.run(handle, workspace, {.x = x.view(), .weight = w.view(), .y = y.view()}); });
  const auto early = QgemmPlan::select(
      kDevice,
      {.spec = w.view().spec, .m = 2, .n = 64, .k = 64, .early_start = true, .variant = "qgemm_sm80"});
  try_call("qgemm early",
           [&] { early.run(handle, workspace, {.x = x.view(), .weight = w.view(), .y = y.view()}); });

  const std::vector<Communicator> members =
      Communicator::of_devices(std::vector<Device>{kDevice, {DeviceKind::cuda, 1}}, Transport::peer);
  try_call("all_reduce", [&] { members[0].all_reduce(x.view(), handle); });
  try_call("quantize()", [&] { quantize(x.view(), QuantSpec(), {}, {.stream = handle}); });
  try_call("copy", [&] { copy(kDevice, y.data(), x.data(), 1, handle); });
  try_call("to", [&] { x.to({}, handle); });
  const cuda::Scope scope(cuda::context(0));
  try_call("fill", [&] { cuda::fill(y.data(), 0, 1, handle); });
  try_call("set", [&] { cuda::set(y.data(), "1234", 4, handle); });
  const cuda::Matmul matmul(cuda::context(0),
                            {.m = 1, .n = 1, .k = 1, .x_stride = 1, .w_stride = 1, .y_stride = 1}, 1 << 20);
  try_call("matmul", [&] { matmul.run(x.data(), x.data(), nullptr, y.data(), nullptr, handle); });
}

// They want different amounts of shared memory. A plan that says how much its kernel may take must leave
// others theirs.
void shapes() {
  struct Product {
    Tensor x, y;
    PackedTensor weight;
    QgemmPlan plan;
    Memory workspace;
  };
  const QuantSpec spec{.format = Format::int4, .asymmetric = true, .group_size = 32};
  std::vector<Product> products;
  for (int64_t k = 8192; k > 0; k -= 256) {
    QgemmDescriptor d{.spec = spec, .m = 2, .n = 512, .k = k, .dtype = DType::f32};
    d.variant = "qgemm_sm90_f32";
    const QgemmPlan plan = QgemmPlan::select(kDevice, d);
    products.push_back({Tensor(kDevice, DType::f32, {d.m, k}), Tensor(kDevice, DType::f32, {d.m, d.n}),
                        PackedTensor(spec, d.n, k, kDevice), plan, Memory(kDevice, plan.workspace_size())});
  }
  int num_runs = 0;
  for (int round = 0; round < 2; ++round)
    for (const Product& each : products) {
      each.plan.run(nullptr, each.workspace,
                    {.x = each.x.view(), .weight = each.weight.view(), .y = each.y.view()});
      ++num_runs;
    }
  fmt::print("{} runs\n", num_runs);
}

int sticky() {
  const Memory before(kDevice, 64);
  const Stream stream(kDevice);
  const auto function = cuda::get_kernel(cuda::context(0), spec_of("first"));
  const cuda::Scope scope(cuda::context(0));
  int code = report([&] { cuda::launch(function, {1, 32}, stream.handle(), 0); });
  const std::function<void()> later[] = {
      [&] {
        cuda::launch(function, {1, 32}, stream.handle(), 0);
      },
      [&] { cuda::get_kernel(cuda::context(0), spec_of("second")); },
      [&] { stream.synchronize(); },
      [&] { Memory(kDevice, 64); },
      [&] { copy(kDevice, before.data(), before.data(), 1); },
  };
  for (const auto& call : later)
    if (report(call) != code) code = static_cast<int>(ErrorCode::bug);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words[0] == "info") return report([] { info(); });
  if (words[0] == "kernels") return kernels(std::stoi(words[1]), {words.begin() + 2, words.end()});
  if (words[0] == "load") {
    const int code = report([&] { load_kernel_pack(words[1]); });
    return code != 0 ? code : kernels(1, {words.begin() + 2, words.end()});
  }
  if (words[0] == "pack")
    return report([&] { write_pack(words[1], words[2], {words.begin() + 3, words.end()}); });
  if (words[0] == "memory") return report([&] { memory(std::stoll(words[1])); });
  if (words[0] == "matmul") return report(matmul);
  if (words[0] == "stream") return report(stream);
  if (words[0] == "shapes") return report(shapes);
  return sticky();
}
