// Plain kernels, launched by the driver with what their descriptions say, against the ops on the CPU: the
// same bytes, for any grid.
#include <map>

#include "cuda/nvrtc.h"
#include "halfbyte/affine_qdq.hpp"
#include "halfbyte/fake_quantize.hpp"
#include "halfbyte/kernels.hpp"
#include "halfbyte/observe.hpp"
#include "halfbyte/qgemm.hpp"
#include "harness.h"
#include "kernels/test_formula.h"

namespace halfbyte {
namespace {

using testing::kCuda;
using testing::same_bytes;
using testing::same_values;
using testing::Values;

using Bytes = std::vector<uint8_t>;

constexpr DType kDTypes[] = {DType::f32, DType::f16, DType::bf16, DType::f64};

// Memory for n elements, poisoned.
Bytes poisoned(int64_t n, DType dtype) { return Bytes(static_cast<size_t>(n * size_of(dtype)), 0xA5); }
Bytes zero_counts() { return Bytes(48, 0); }
template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto* const data = reinterpret_cast<const uint8_t*>(values.data());
  return {data, data + values.size() * sizeof(T)};
}

QuantizeStatus status_of(const Bytes& counts) {
  uint64_t c[6];
  std::memcpy(c, counts.data(), sizeof c);
  const auto number = [&](int i) { return static_cast<int64_t>(c[i]); };
  return {number(0), c[1] == 0 ? -1 : static_cast<int64_t>(~c[1]), number(2), number(3), number(4),
          number(5)};
}

class PlainKernel {
 public:
  PlainKernel(const char* name, const KernelConfig& config) : description_(describe_kernel(name, config)) {
    const std::string& target = cuda::context(kCuda.index).target;
    const cuda::Scope scope(cuda::context(kCuda.index));
    const cuda::Driver& cuda = cuda::driver();
    const std::string ptx = emit_ptx(name, config, target);
    cuda::CUresult result = cuda.cuModuleLoadData(&module_, ptx.c_str());
    if (result == 222) {  // a driver that is older than NVRTC takes no PTX of it
      const std::vector<std::byte> cubin = emit_cubin(name, config, target);
      result = cuda.cuModuleLoadData(&module_, cubin.data());
    }
    cuda::check(result, "cuModuleLoadData");
    cuda::check(cuda.cuModuleGetFunction(&function_, module_, name), "cuModuleGetFunction");
  }
  PlainKernel(const PlainKernel&) = delete;
  PlainKernel& operator=(const PlainKernel&) = delete;
  ~PlainKernel() {
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::driver().cuModuleUnload(module_);
  }

  // The memory at pointers, by name; optional ones may be missing. What is written comes back.
  using Memories = std::map<std::string, Bytes*>;
  // num_blocks: 0: what the description says.
  void run(const Memories& memories, const FormulaNumbers& numbers, double history = 0,
           int64_t num_blocks = 0) const {
    struct Argument {
      int64_t integer = 0;
      int32_t word = 0;
      double real = 0;
      std::optional<testing::DeviceBytes> memory;
      void* pointer = nullptr;
    };
    const std::vector<KernelParameter>& parameters = description_.parameters;
    std::vector<Argument> arguments(parameters.size());
    std::vector<void*> addresses;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const KernelParameter& parameter = parameters[i];
      Argument& to = arguments[i];
      if (!parameter.is_pointer()) {
        if (parameter.type == "f64") {
          to.real = history;
          addresses.push_back(&to.real);
        } else if (parameter.type == "i32") {
          to.word = static_cast<int32_t>(numbers.find(parameter.name)->second);
          addresses.push_back(&to.word);
        } else {
          to.integer = numbers.find(parameter.name)->second;
          addresses.push_back(&to.integer);
        }
        continue;
      }
      addresses.push_back(&to.pointer);
      const auto found = memories.find(parameter.name);
      if (found == memories.end()) {
        EXPECT_TRUE(parameter.optional) << parameter.name;
        continue;
      }
      const Bytes& bytes = *found->second;
      EXPECT_EQ(Formula::value(parameter.elements, numbers) * parameter.alignment(),
                static_cast<int64_t>(bytes.size()))
          << parameter.name;
      to.memory.emplace(static_cast<int64_t>(bytes.size()), parameter.alignment(), false);
      to.memory->upload(bytes.data());
      to.pointer = to.memory->data();
    }
    const int64_t blocks = num_blocks > 0 ? num_blocks : Formula::value(description_.grid, numbers);
    {
      const cuda::Scope scope(cuda::context(kCuda.index));
      cuda::check(cuda::driver().cuLaunchKernel(function_, static_cast<unsigned>(blocks), 1, 1,
                                                static_cast<unsigned>(description_.block), 1, 1,
                                                static_cast<unsigned>(description_.shared_bytes), nullptr,
                                                addresses.data(), nullptr),
                  "cuLaunchKernel");
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!arguments[i].memory) continue;
      Bytes& bytes = *memories.find(parameters[i].name)->second;
      const Bytes before = bytes;
      arguments[i].memory->download(bytes.data());
      EXPECT_TRUE(parameters[i].access != "read" || bytes == before) << parameters[i].name;
    }
  }

 private:
  KernelDescription description_;
  cuda::CUmodule module_ = nullptr;
  cuda::CUfunction function_ = nullptr;
};

class PlainKernels : public testing::CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (const std::string& problem = cuda::find_nvrtc().problem; !problem.empty()) GTEST_SKIP() << problem;
  }
};

struct MatrixShape {
  int64_t rows, cols, group_size;
};
constexpr MatrixShape kShapes[] = {{1, 1, 64},  {5, 100, 7},  {3, 1000, 64}, {2, 513, 513},
                                   {9, 72, 24}, {1, 4099, 1}, {2, 300, 128}, {0, 64, 32}};

KernelConfig config_of(const QuantSpec& spec, DType dtype) {
  KernelConfig config = {{"format", info(spec.format).name},
                         {"asymmetric", spec.asymmetric ? "yes" : "no"},
                         {"scale-dtype", to_string(spec.scale_dtype)},
                         {"dtype", to_string(dtype)}};
  if (spec.format == Format::lut4) {
    std::string table;
    for (const float value : spec.table) table += fmt::format("{}{}", table.empty() ? "" : ",", value);
    config.emplace_back("table", table);
  }
  return config;
}

TEST_F(PlainKernels, QuantizeAndDequantize) {
  size_t number = 0;
  for (testing::EncodedSpec spec : testing::all_specs()) {
    if (info(spec.format).scale_dtype) continue;  // not of plain kernels
    const DType dtype = kDTypes[number % 4];
    spec.scale_dtype = kDTypes[number / 4 % 3];
    const ScaleRule rule = *spec.encoding.scale_rule;
    if (rule == ScaleRule::mlx_edge) spec.encoding.code_scale = CodeScale::unrounded;
    ++number;
    KernelConfig config = config_of(spec, dtype);
    const PlainKernel decode("halfbyte_dequantize", config);
    config.emplace_back("scale-rule", to_string(rule));
    config.emplace_back("unrounded", rule == ScaleRule::mlx_edge ? "yes" : "no");
    const PlainKernel encode("halfbyte_quantize", config);
    for (const MatrixShape& shape : kShapes) {
      const auto [rows, cols, group_size] = shape;
      spec.group_size = group_size;
      const Values clean = testing::random_values(dtype, rows * cols, number);
      for (const Values& values : {clean, testing::with_nonfinite(clean)})
        for (const int64_t num_blocks : {0, 1}) {
          SCOPED_TRACE(fmt::format("{} {} [{}, {}]", testing::describe(spec), to_string(dtype), rows, cols));
          testing::Parts cpu = testing::quantize_on_cpu(values.bytes.data(), dtype, spec, rows, cols);
          const QuantShape parts = quant_shape(spec, rows, cols);
          Bytes x = values.bytes, codes = poisoned(parts.code_bytes(), DType::u8),
                scales = poisoned(parts.num_groups, spec.scale_dtype),
                zeros = poisoned(parts.num_groups, DType::u8), biases = scales, counts = zero_counts();
          const FormulaNumbers numbers = {{"rows", rows}, {"cols", cols}, {"group_size", group_size}};
          PlainKernel::Memories memories = {{"codes", &codes}, {"scales", &scales}};
          if (has_zeros(spec)) memories.emplace("zeros", &zeros);
          if (has_biases(spec)) memories.emplace("biases", &biases);
          PlainKernel::Memories to_encode = memories;
          to_encode.emplace("x", &x);
          to_encode.emplace("counts", &counts);
          encode.run(to_encode, numbers, 0, num_blocks);
          EXPECT_TRUE(same_bytes("codes", cpu.codes.data(), codes.data(), codes.size()));
          EXPECT_TRUE(same_bytes("scales", cpu.scales.data(), scales.data(), scales.size()));
          if (has_zeros(spec)) {
            EXPECT_TRUE(same_bytes("zeros", cpu.zeros.data(), zeros.data(), zeros.size()));
          }
          if (has_biases(spec)) {
            EXPECT_TRUE(same_bytes("biases", cpu.biases.data(), biases.data(), biases.size()));
          }
          EXPECT_TRUE(testing::same(cpu.status, status_of(counts)));
          Bytes y = poisoned(rows * cols, dtype);
          memories.emplace("y", &y);
          decode.run(memories, numbers, 0, num_blocks);
          EXPECT_TRUE(same_values(testing::dequantize_on_cpu(cpu, dtype), y, dtype));
          if (HasFailure()) return;
        }
    }
  }
}

// A tensor and its groups, as descriptors of the ops and as numbers of the kernels have them.
struct Grouped {
  std::vector<int64_t> shape;
  Granularity granularity;
  int axis;
  int64_t group_size;
  FormulaNumbers numbers;
};
const std::vector<Grouped>& grouped_tensors() {
  const auto numbers = [](int64_t outer, int64_t axis, int64_t inner, int64_t group_outer, int64_t group_axis,
                          int64_t group_inner) {
    return FormulaNumbers{{"outer", outer},           {"axis", axis},
                          {"inner", inner},           {"group_outer", group_outer},
                          {"group_axis", group_axis}, {"group_inner", group_inner}};
  };
  static const std::vector<Grouped> tensors = {
      {{7, 93}, Granularity::tensor, -1, 0, numbers(1, 651, 1, 1, 651, 1)},
      {{4, 6, 35}, Granularity::channel, 1, 0, numbers(4, 6, 35, 4, 1, 35)},
      {{300, 5}, Granularity::channel, 0, 0, numbers(1, 300, 5, 1, 1, 5)},
      {{9, 100}, Granularity::group, -1, 32, numbers(9, 100, 1, 1, 32, 1)},
      {{3, 40, 11}, Granularity::group, 1, 16, numbers(3, 40, 11, 1, 16, 1)},
      {{0, 16}, Granularity::group, -1, 16, numbers(0, 16, 1, 1, 16, 1)},
  };
  return tensors;
}

TEST_F(PlainKernels, FakeQuantizeForwardAndBackward) {
  struct Case {
    DType dtype, scale_dtype;
    std::optional<DType> zero;
    std::optional<Format> format;
  };
  const Case cases[] = {{DType::f32, DType::f32, {}, {}},
                        {DType::bf16, DType::f32, DType::i32, {}},
                        {DType::f16, DType::f16, DType::f32, {}},
                        {DType::f64, DType::f64, DType::f64, {}},
                        {DType::bf16, DType::bf16, {}, Format::nf4},
                        {DType::f64, DType::f32, {}, Format::fp4_e2m1}};
  uint64_t seed = 1;
  for (const Case& test : cases) {
    const KernelConfig config = {{"dtype", to_string(test.dtype)},
                                 {"scale-dtype", to_string(test.scale_dtype)},
                                 {"zero-point", test.zero ? to_string(*test.zero) : "none"},
                                 {"format", test.format ? info(*test.format).name : "integers"}};
    const PlainKernel forward("halfbyte_fake_quantize", config);
    const PlainKernel backward("halfbyte_fake_quantize_backward", config);
    for (const Grouped& grouped : grouped_tensors())
      for (const int64_t num_blocks : {0, 1}) {
        FakeQuantizeDescriptor descriptor;
        descriptor.shape = grouped.shape;
        descriptor.granularity = grouped.granularity;
        descriptor.axis = grouped.axis;
        descriptor.group_size = grouped.group_size;
        descriptor.format = test.format;
        descriptor.dtype = test.dtype;
        descriptor.scale_dtype = test.scale_dtype;
        descriptor.zero_point_dtype = test.zero;
        descriptor.q_min = test.zero ? 0 : -8;
        descriptor.q_max = test.zero ? 15 : 7;
        descriptor.alignment = size_of(test.dtype);
        const TensorView scale_like = {nullptr, test.scale_dtype, descriptor.scale_shape(), {}, {}};
        const int64_t num_scales = num_elements(scale_like);
        Values x =
            testing::with_nonfinite(testing::random_values(test.dtype, num_elements(grouped.shape), seed));
        Values dy = testing::random_values(test.dtype, static_cast<int64_t>(x.exact.size()), seed + 1);
        Values scales;
        scales.dtype = test.scale_dtype;
        std::mt19937_64 random(++seed);
        const double odd[] = {0.0, -1.0, INFINITY};  // no scale, and what is none
        for (int64_t i = 0; i < num_scales; ++i)
          scales.push_back(i % 7 == 5 ? odd[random() % 3]
                                      : std::ldexp(1.0, static_cast<int>(random() % 9) - 10));
        Bytes zeros;
        if (test.zero == DType::i32) {
          std::vector<int32_t> values(static_cast<size_t>(num_scales));
          for (int32_t& value : values) value = static_cast<int32_t>(random() % 20) - 2;
          zeros = bytes_of(values);
        } else if (test.zero) {
          Values values;
          values.dtype = *test.zero;
          for (int64_t i = 0; i < num_scales; ++i)
            values.push_back(i % 5 == 4 ? NAN : static_cast<double>(random() % 64) / 4);
          zeros = values.bytes;
        }
        SCOPED_TRACE(fmt::format("{} [{}] {} {}", to_string(test.dtype), fmt::join(grouped.shape, ", "),
                                 to_string(grouped.granularity), num_blocks));
        const TensorView scale = {scales.bytes.data(), test.scale_dtype, descriptor.scale_shape(), {}, {}};
        const TensorView zero =
            test.zero ? TensorView{zeros.data(), *test.zero, descriptor.scale_shape(), {}, {}} : TensorView{};
        Bytes y(x.bytes.size()), dx(x.bytes.size());
        FormulaNumbers numbers = grouped.numbers;
        numbers.emplace("q_min", descriptor.q_min);
        numbers.emplace("q_max", descriptor.q_max);
        PlainKernel::Memories memories = {{"x", &x.bytes}, {"scales", &scales.bytes}};
        if (test.zero) memories.emplace("zeros", &zeros);

        const auto plan = FakeQuantizePlan::select({}, descriptor);
        Bytes workspace(static_cast<size_t>(plan.workspace_size()));
        FakeQuantize::Args args;
        args.x = x.view(grouped.shape);
        args.y = {y.data(), test.dtype, grouped.shape, {}, {}};
        args.scale = scale;
        args.zero_point = zero;
        plan.run(nullptr, workspace, args);
        Bytes y_cuda = poisoned(static_cast<int64_t>(x.exact.size()), test.dtype), counts = zero_counts();
        PlainKernel::Memories given = memories;
        given.emplace("y", &y_cuda);
        given.emplace("counts", &counts);
        forward.run(given, numbers, 0, num_blocks);
        EXPECT_EQ(y, y_cuda);
        const QuantizeStatus cpu = plan.status(nullptr, workspace), cuda = status_of(counts);
        EXPECT_TRUE(testing::same(cpu, cuda));
        EXPECT_EQ(cpu.num_invalid_scales, cuda.num_invalid_scales);
        EXPECT_EQ(cpu.num_invalid_zero_points, cuda.num_invalid_zero_points);

        const auto gradients = FakeQuantizeBackwardPlan::select({}, descriptor);
        workspace.resize(static_cast<size_t>(gradients.workspace_size()));
        FakeQuantizeBackward::Args of_gradients;
        of_gradients.x = args.x;
        of_gradients.dy = dy.view(grouped.shape);
        of_gradients.scale = scale;
        of_gradients.zero_point = zero;
        of_gradients.dx = {dx.data(), test.dtype, grouped.shape, {}, {}};
        gradients.run(nullptr, workspace, of_gradients);
        Bytes dx_cuda = y_cuda;
        counts = zero_counts();
        given = memories;
        given.emplace("dy", &dy.bytes);
        given.emplace("dx", &dx_cuda);
        given.emplace("counts", &counts);
        backward.run(given, numbers, 0, num_blocks);
        EXPECT_EQ(dx, dx_cuda);
        if (HasFailure()) return;
      }
  }
}

TEST_F(PlainKernels, ObserveTwoBatches) {
  for (const DType dtype : kDTypes) {
    const PlainKernel kernel("halfbyte_observe", {{"dtype", to_string(dtype)}});
    for (const Grouped& grouped : grouped_tensors())
      for (const ObserverKind kind : {ObserverKind::min_max, ObserverKind::moving_average}) {
        ObserveDescriptor descriptor;
        descriptor.shape = grouped.shape;
        descriptor.granularity = grouped.granularity;
        descriptor.axis = grouped.axis;
        descriptor.group_size = grouped.group_size;
        descriptor.dtype = dtype;
        descriptor.observer.kind = kind;
        descriptor.observer.momentum = 0.9;
        descriptor.alignment = size_of(dtype);
        SCOPED_TRACE(fmt::format("{} [{}] {} {}", to_string(dtype), fmt::join(grouped.shape, ", "),
                                 to_string(grouped.granularity), to_string(kind)));
        const DType state_dtype = descriptor.state_dtype();
        Values empty;
        empty.dtype = state_dtype;
        const int64_t num_groups = num_elements(descriptor.state_shape());
        for (int64_t i = 0; i < num_groups; ++i) empty.push_back(INFINITY);
        Bytes min = empty.bytes, min_cuda = min;
        empty = {};
        empty.dtype = state_dtype;
        for (int64_t i = 0; i < num_groups; ++i) empty.push_back(-INFINITY);
        Bytes max = empty.bytes, max_cuda = max, batches(8, 0), batches_cuda = batches;
        const auto plan = ObservePlan::select({}, descriptor);
        Bytes workspace(static_cast<size_t>(plan.workspace_size()));
        for (const uint64_t seed : {1u, 2u}) {
          Values x =
              testing::with_nonfinite(testing::random_values(dtype, num_elements(grouped.shape), seed));
          plan.run(nullptr, workspace,
                   {.x = x.view(grouped.shape),
                    .min = {min.data(), state_dtype, descriptor.state_shape(), {}, {}},
                    .max = {max.data(), state_dtype, descriptor.state_shape(), {}, {}},
                    .num_batches = {batches.data(), DType::i64, {}, {}, {}}});
          Bytes counts = zero_counts();
          kernel.run({{"x", &x.bytes},
                      {"min", &min_cuda},
                      {"max", &max_cuda},
                      {"num_batches", &batches_cuda},
                      {"counts", &counts}},
                     grouped.numbers, kind == ObserverKind::min_max ? -1 : 0.9, seed == 1 ? 0 : 2);
          EXPECT_EQ(min, min_cuda);
          EXPECT_EQ(max, max_cuda);
          EXPECT_EQ(batches, batches_cuda);
          EXPECT_TRUE(testing::same(plan.status(nullptr, workspace), status_of(counts)));
          if (HasFailure()) return;
        }
      }
  }
}

TEST_F(PlainKernels, AffineQdqAndBackward) {
  size_t number = 0;
  for (const int bits : {2, 3, 4, 5, 6, 8})
    for (const bool packed : {true, false}) {
      const DType dtype = kDTypes[number % 3], scale_dtype = kDTypes[number / 2 % 3];
      ++number;
      const std::string code_bits = std::to_string(packed ? bits : 8);
      const PlainKernel decode(
          "halfbyte_affine_qdq",
          {{"code-bits", code_bits}, {"scale-dtype", to_string(scale_dtype)}, {"dtype", to_string(dtype)}});
      const PlainKernel backward("halfbyte_affine_qdq_backward",
                                 {{"code-bits", code_bits}, {"dtype", to_string(dtype)}});
      for (const MatrixShape& shape : kShapes) {
        const auto [rows, cols, group_size] = shape;
        if (rows == 0) continue;
        AffineQdqDescriptor descriptor;
        descriptor.rows = rows;
        descriptor.cols = cols;
        descriptor.bits = bits;
        descriptor.group_size = group_size;
        descriptor.packed = packed;
        descriptor.dtype = dtype;
        descriptor.scale_dtype = scale_dtype;
        descriptor.alignment = size_of(dtype);
        SCOPED_TRACE(
            fmt::format("{} bits, packed {}, {} [{}, {}]", bits, packed, to_string(dtype), rows, cols));
        const std::vector<int64_t> groups = descriptor.scale_shape();
        Values w = testing::random_values(dtype, rows * cols, number),
               dy = testing::random_values(dtype, rows * cols, number + 100);
        Bytes codes = poisoned(num_elements(descriptor.code_shape()), DType::u8);
        Bytes scales = poisoned(groups[0] * groups[1], scale_dtype), biases = scales;
        const TensorView code_view = {codes.data(), DType::u8, descriptor.code_shape(), {}, {}};
        const TensorView scale_view = {scales.data(), scale_dtype, groups, {}, {}};
        const TensorView bias_view = {biases.data(), scale_dtype, groups, {}, {}};
        const auto init = AffineInitPlan::select({}, descriptor);
        Bytes workspace(static_cast<size_t>(init.workspace_size()));
        init.run(nullptr, workspace,
                 {.w = w.view({rows, cols}), .codes = code_view, .scales = scale_view, .biases = bias_view});
        Bytes y(w.bytes.size()), y_cuda = poisoned(rows * cols, dtype);
        const auto qdq = AffineQdqPlan::select({}, descriptor);
        workspace.resize(static_cast<size_t>(qdq.workspace_size()));
        qdq.run(nullptr, workspace,
                {.codes = code_view,
                 .scales = scale_view,
                 .biases = bias_view,
                 .y = {y.data(), dtype, {rows, cols}, {}, {}}});
        const FormulaNumbers numbers = {{"rows", rows}, {"cols", cols}, {"group_size", group_size}};
        decode.run({{"codes", &codes}, {"scales", &scales}, {"biases", &biases}, {"y", &y_cuda}}, numbers);
        EXPECT_TRUE(same_values(y, y_cuda, dtype));

        Bytes dscales = poisoned(groups[0] * groups[1], DType::f32), dbiases = dscales;
        Bytes dscales_cuda = dscales, dbiases_cuda = dscales;
        const auto gradients = AffineQdqBackwardPlan::select({}, descriptor);
        workspace.resize(static_cast<size_t>(gradients.workspace_size()));
        AffineQdqBackward::Args args;
        args.codes = code_view;
        args.dy = dy.view({rows, cols});
        args.dscales = {dscales.data(), DType::f32, groups, {}, {}};
        args.dbiases = {dbiases.data(), DType::f32, groups, {}, {}};
        gradients.run(nullptr, workspace, args);
        for (const int64_t num_blocks : {0, 1}) {
          backward.run(
              {{"codes", &codes}, {"dy", &dy.bytes}, {"dscales", &dscales_cuda}, {"dbiases", &dbiases_cuda}},
              numbers, 0, num_blocks);
          EXPECT_EQ(dscales, dscales_cuda);
          EXPECT_EQ(dbiases, dbiases_cuda);
        }
        if (HasFailure()) return;
      }
    }
}

TEST_F(PlainKernels, QgemmHasTheBytesOfTheReference) {
  const QuantSpec specs[] = {{.format = Format::nf4},
                             {.format = Format::nf4, .scale_dtype = DType::bf16},
                             {.format = Format::int4, .asymmetric = true, .scale_dtype = DType::f16},
                             {.format = Format::int8},
                             {.format = Format::affine4, .scale_dtype = DType::f16},
                             {.format = Format::affine8}};
  struct Shape {
    int64_t m, n, k, group_size;
    bool bias;
  };
  const Shape shapes[] = {{1, 1, 1, 64, false},     {3, 17, 130, 32, true},  {5, 9, 257, 64, true},
                          {2, 33, 512, 512, false}, {4, 5, 1000, 128, true}, {0, 8, 64, 64, true},
                          {2, 3, 0, 64, true}};
  size_t number = 0;
  for (QuantSpec spec : specs) {
    const DType dtype = kDTypes[number++ % 3];
    const PlainKernel kernel("halfbyte_qgemm", config_of(spec, dtype));
    for (const auto& [m, n, k, group_size, has_bias] : shapes) {
      SCOPED_TRACE(fmt::format("{} {} {} x {} x {}", testing::describe(spec), to_string(dtype), m, n, k));
      spec.group_size = group_size;
      const QuantShape shape = quant_shape(spec, n, k);
      const Values w = testing::random_values(DType::f32, n * k, number);
      testing::Parts parts = testing::quantize_on_cpu(w.bytes.data(), DType::f32, spec, n, k);
      Values x = testing::random_values(dtype, m * k, number + 10),
             bias = testing::random_values(dtype, n, 3);
      Bytes y(static_cast<size_t>(m * n * size_of(dtype)));
      QgemmDescriptor descriptor;
      descriptor.spec = spec;
      descriptor.m = m;
      descriptor.n = n;
      descriptor.k = k;
      descriptor.dtype = dtype;
      descriptor.packed = false;
      descriptor.bias = has_bias;
      descriptor.alignment = size_of(dtype);
      descriptor.variant = "qgemm_ref";
      const auto plan = QgemmPlan::select({}, descriptor);
      Bytes workspace(static_cast<size_t>(plan.workspace_size()));
      Qgemm::Args args;
      args.x = x.view({m, k});
      args.view.spec = spec;
      args.view.rows = n;
      args.view.cols = k;
      args.view.codes = parts.codes.data();
      args.view.scales = parts.scales.data();
      if (has_zeros(spec)) args.view.zeros = parts.zeros.data();
      if (has_biases(spec)) args.view.biases = parts.biases.data();
      if (has_bias) args.bias = bias.view({n});
      args.y = {y.data(), dtype, {m, n}, {}, {}};
      plan.run(nullptr, workspace, args);

      const auto part = [](const Bytes& guarded, int64_t num_bytes) {
        return Bytes(guarded.begin(), guarded.begin() + num_bytes);
      };
      const int64_t scale_bytes = shape.num_groups * size_of(spec.scale_dtype);
      Bytes codes = part(parts.codes, shape.code_bytes()), scales = part(parts.scales, scale_bytes),
            zeros = part(parts.zeros, has_zeros(spec) ? shape.num_groups : 0),
            biases = part(parts.biases, has_biases(spec) ? scale_bytes : 0), y_cuda = poisoned(m * n, dtype);
      PlainKernel::Memories memories = {
          {"x", &x.bytes}, {"codes", &codes}, {"scales", &scales}, {"y", &y_cuda}};
      if (has_zeros(spec)) memories.emplace("zeros", &zeros);
      if (has_biases(spec)) memories.emplace("biases", &biases);
      if (has_bias) memories.emplace("bias", &bias.bytes);
      for (const int64_t num_blocks : {0, 1}) {
        kernel.run(memories, {{"m", m}, {"n", n}, {"k", k}, {"group_size", group_size}}, 0, num_blocks);
        EXPECT_TRUE(same_values(y, y_cuda, dtype));
      }
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace halfbyte
