// Evaluates a model of the Llama type, with experts or without, over a text, or lets it write one. Bytes are
// the tokens.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "halfbyte/system.hpp"
#include "model.h"

namespace llama {
namespace {

using halfbyte::DType;
using halfbyte::Error;
using halfbyte::ErrorCode;
using Json = nlohmann::ordered_json;

constexpr const char* kUsage = R"(usage: llama (--eval FILE | --prompt TEXT) [options] MODEL_DIR
  --eval FILE          nats per byte of FILE, in windows: of each, all bytes behind the first are predicted
    --window N         bytes of a window (512)
    --windows N        the first N windows; otherwise all that FILE has
  --prompt TEXT        writes what follows TEXT
    --tokens N         bytes to write (128)
    --temperature T    0: always the likeliest byte (0)
    --seed N           of the choices at a temperature (0)
  --matmul KIND        of quantized weights: fused (they stay quantized), or dequantize (to f32, when loaded) (fused)
  --dtype TYPE         of what goes into linear layers and comes out: f32 or bf16 (f32)
  --math KIND          of fused linear layers: auto, or int8 (on the CPU: what goes into them has 8 bits; experts as
                       auto) (auto)
  --device DEVICE      of fused products: cpu, cuda, cuda:N; the rest is computed on the host (cpu)
  --tensor-parallel N  cuts weights among N devices: the first N of CUDA; of the CPU N groups of threads (1)
  --threads N          (all)
  --json               one JSON document
)";

struct Arguments {
  std::string model, eval;
  std::optional<std::string> prompt;
  int64_t window = 512;
  std::optional<int64_t> windows;
  int64_t tokens = 128;
  double temperature = 0;
  int64_t seed = 0;
  Options options;
  bool json = false;
};

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorCode::usage, message); }

template <class Number>
Number parse_number(const std::string& option, const std::string& word, Number least) {
  Number value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || end != word.data() + word.size() || !(value >= least) || value > Number(1e18))
    refuse(option + ": must be a number from " + std::to_string(least) + ", got \"" + word + "\"");
  return value;
}

Arguments parse_arguments(int argc, char** argv) {
  Arguments result;
  Options& options = result.options;
  options.num_threads = halfbyte::system_info().num_threads;
  int64_t num_members = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 == argc) refuse(word + ": must have a value");
      return argv[++i];
    };
    const auto one_of = [&](const char* first, const char* second) {
      const std::string choice = value();
      if (choice != first && choice != second)
        refuse(word + ": must be " + first + " or " + second + ", got \"" + choice + "\"");
      return choice == first;
    };
    if (word == "--eval")
      result.eval = value();
    else if (word == "--window")
      result.window = parse_number<int64_t>(word, value(), 2);
    else if (word == "--windows")
      result.windows = parse_number<int64_t>(word, value(), 1);
    else if (word == "--prompt")
      result.prompt = value();
    else if (word == "--tokens")
      result.tokens = parse_number<int64_t>(word, value(), 1);
    else if (word == "--temperature")
      result.temperature = parse_number<double>(word, value(), 0);
    else if (word == "--seed")
      result.seed = parse_number<int64_t>(word, value(), 0);
    else if (word == "--matmul")
      options.matmul = one_of("fused", "dequantize") ? Matmul::fused : Matmul::dequantize;
    else if (word == "--dtype")
      options.dtype = one_of("f32", "bf16") ? DType::f32 : DType::bf16;
    else if (word == "--math")
      options.math = halfbyte::parse_qgemm_math(one_of("auto", "int8") ? "auto" : "int8");
    else if (word == "--device")
      options.device = halfbyte::parse_device(value());
    else if (word == "--tensor-parallel")
      num_members = parse_number<int64_t>(word, value(), 1);
    else if (word == "--threads")
      options.num_threads =
          static_cast<int>(std::min<int64_t>(parse_number<int64_t>(word, value(), 1), 1024));
    else if (word == "--json")
      result.json = true;
    else if (word.starts_with("-") || !result.model.empty())
      refuse("unexpected \"" + word + "\"");
    else
      result.model = word;
  }
  if (result.model.empty()) refuse("MODEL_DIR must be given");
  if (result.eval.empty() == !result.prompt) refuse("one of --eval and --prompt must be given");
  if (result.prompt && result.prompt->empty()) refuse("--prompt: must have a byte");
  constexpr int64_t kMostMembers = 64;
  if (num_members > kMostMembers)
    refuse("--tensor-parallel: must be at most " + std::to_string(kMostMembers) + ", got " +
           std::to_string(num_members));
  if (num_members > 1 && options.device.index > 0)
    refuse("--tensor-parallel: is over the first CUDA devices, got --device " +
           halfbyte::to_string(options.device));
  for (int i = 0; i < num_members; ++i)
    options.members.push_back(
        {options.device.kind, options.device.kind == halfbyte::DeviceKind::cuda ? i : 0});
  return result;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file.is_open() || file.bad()) throw Error(ErrorCode::io, path + ": cannot be read");
  return text;
}

std::span<const uint8_t> as_tokens(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Natural logarithm of the sum of exponentials.
double log_sum_exp(std::span<const float> logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return largest + std::log(sum);
}

double seconds_of(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Of each window, every byte behind the first is predicted from those before it.
Json evaluate(Model& model, const Arguments& arguments) {
  const std::string text = read_file(arguments.eval);
  const auto window = static_cast<size_t>(arguments.window), available = text.size() / window;
  if (arguments.window > model.config().max_positions)
    refuse("--window: must be at most the model's " + std::to_string(model.config().max_positions) +
           " positions, got " + std::to_string(window));
  const auto windows =
      static_cast<size_t>(arguments.windows.value_or(std::max<int64_t>(static_cast<int64_t>(available), 1)));
  if (windows > available)
    throw Error(ErrorCode::bad_input, arguments.eval + ": must have " + std::to_string(windows) +
                                          " windows of " + std::to_string(window) + " bytes, has " +
                                          std::to_string(text.size()) + " bytes");
  const auto vocab = static_cast<size_t>(model.config().vocab_size);
  double nats = 0;
  const double seconds = seconds_of([&] {
    for (size_t i = 0; i < windows; ++i) {
      Model::Cache cache = model.make_cache(arguments.window);
      const std::span<const uint8_t> tokens = as_tokens(text).subspan(i * window, window);
      const std::vector<float> logits = model.forward(tokens.first(window - 1), cache, arguments.window - 1);
      for (size_t row = 0; row + 1 < window; ++row) {
        const std::span<const float> values(logits.data() + row * vocab, vocab);
        nats += log_sum_exp(values) - values[tokens[row + 1]];
      }
    }
  });
  if (!std::isfinite(nats)) throw Error(ErrorCode::bad_input, "the model gives logits that are not finite");
  const auto predictions = static_cast<double>(windows * (window - 1));
  return {{"file", arguments.eval},
          {"window", window},
          {"windows", windows},
          {"predictions", windows * (window - 1)},
          {"nats_per_byte", nats / predictions},
          {"seconds", seconds},
          {"tokens_per_second", predictions / seconds}};
}

uint8_t choose(std::span<const float> logits, double temperature, std::mt19937_64& random) {
  if (temperature == 0)
    return static_cast<uint8_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  const double largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> sums;  // of weights up to each byte
  for (const float logit : logits)
    sums.push_back((sums.empty() ? 0 : sums.back()) + std::exp((logit - largest) / temperature));
  const double place = static_cast<double>(random() >> 11) * 0x1p-53 * sums.back();
  return static_cast<uint8_t>(std::upper_bound(sums.begin(), sums.end() - 1, place) - sums.begin());
}

Json generate(Model& model, const Arguments& arguments) {
  const std::string& prompt = *arguments.prompt;
  const int64_t capacity = static_cast<int64_t>(prompt.size()) + arguments.tokens;
  if (capacity > model.config().max_positions)
    refuse("--prompt and --tokens: must together be at most the model's " +
           std::to_string(model.config().max_positions) + " positions, got " + std::to_string(capacity));
  Model::Cache cache = model.make_cache(capacity);
  std::mt19937_64 random(static_cast<uint64_t>(arguments.seed));
  std::string text;
  std::vector<float> logits;
  const double prompt_seconds = seconds_of([&] { logits = model.forward(as_tokens(prompt), cache, 1); });
  const double seconds = seconds_of([&] {
    for (int64_t i = 0; i < arguments.tokens; ++i) {
      const uint8_t next = choose(logits, arguments.temperature, random);
      text.push_back(static_cast<char>(next));
      if (i + 1 < arguments.tokens) logits = model.forward({&next, 1}, cache, 1);
    }
  });
  return {{"prompt", prompt},
          {"text", text},
          {"tokens", std::vector<int>(as_tokens(text).begin(), as_tokens(text).end())},
          {"prompt_seconds", prompt_seconds},
          {"seconds", seconds},
          {"tokens_per_second", static_cast<double>(arguments.tokens) / seconds}};
}

void print_text(const Arguments& arguments, const Json& document) {
  if (arguments.prompt) {
    const auto text = document["generate"]["text"].get<std::string>();
    std::fwrite(arguments.prompt->data(), 1, arguments.prompt->size(), stdout);
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::printf("\n\n");
  } else {
    const Json& eval = document["eval"];
    std::printf("%.6f nats/byte: %lld predictions, %lld windows of %lld\n",
                eval["nats_per_byte"].get<double>(), eval["predictions"].get<long long>(),
                eval["windows"].get<long long>(), eval["window"].get<long long>());
  }
  const Json& run = document[arguments.prompt ? "generate" : "eval"];
  std::printf("%.1f tokens/s; weights: %lld bytes stored, linear layers %lld bytes in memory\n",
              run["tokens_per_second"].get<double>(), document["stored_bytes"].get<long long>(),
              document["memory_bytes"].get<long long>());
  for (const Json& product : document["products"]) {
    std::printf("%3lld x %s: %s", product["layers"].get<long long>(),
                product["weight"].get<std::string>().c_str(), product["kind"].get<std::string>().c_str());
    for (const char* key : {"kernel", "reason"})
      if (product.contains(key)) std::printf(", %s", product[key].get<std::string>().c_str());
    std::printf("\n");
  }
}

void run(const Arguments& arguments) {
  const Options& options = arguments.options;
  for (const halfbyte::Device& device : options.members) halfbyte::check_device(device);
  for (const char* name : {"tokenizer.json", "tokenizer.model"})
    if (std::filesystem::exists(std::filesystem::path(arguments.model) / name))
      throw Error(ErrorCode::bad_input, arguments.model + ": has " + name +
                                            ", but here bytes are the tokens: a tokenizer is not supported");
  Model model(arguments.model, options);
  const Json result = arguments.prompt ? generate(model, arguments) : evaluate(model, arguments);
  Json document = {{"model", arguments.model},
                   {"model_type", model.config().model_type},
                   {"matmul", options.matmul == Matmul::fused ? "fused" : "dequantize"},
                   {"dtype", halfbyte::to_string(options.dtype)},
                   {"math", halfbyte::to_string(options.math)},
                   {"device", halfbyte::to_string(options.device)},
                   {"tensor_parallel", options.members.size()},
                   {"threads", options.num_threads},
                   {"stored_bytes", model.stored_bytes()},
                   {"memory_bytes", model.memory_bytes()},
                   {"products", Json::array()},
                   {arguments.prompt ? "generate" : "eval", result}};
  for (const auto& [product, layers] : model.products()) {
    Json row = {{"layers", layers}, {"weight", product.weight}, {"kind", product.kind}};
    if (!product.kernel.empty()) row["kernel"] = product.kernel;
    if (!product.reason.empty()) row["reason"] = product.reason;
    document["products"].push_back(row);
  }
  if (arguments.json)
    std::printf("%s\n", document.dump(2, ' ', true, Json::error_handler_t::replace).c_str());
  else
    print_text(arguments, document);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw Error(ErrorCode::io, "standard output: cannot be written");
}

}  // namespace
}  // namespace llama

int main(int argc, char** argv) try {
  if (argc == 2 && std::string_view(argv[1]) == "--help") {
    std::fputs(llama::kUsage, stdout);
    return 0;
  }
  llama::run(llama::parse_arguments(argc, argv));
  return 0;
} catch (const halfbyte::Error& error) {
  std::fprintf(stderr, "llama: %s: %s\n", to_string(error.code()), error.what());
  if (error.code() == halfbyte::ErrorCode::usage) std::fputs(llama::kUsage, stderr);
  return static_cast<int>(error.code());
} catch (const std::bad_alloc&) {
  std::fputs("llama: NO_MEMORY: out of memory\n", stderr);
  return static_cast<int>(halfbyte::ErrorCode::no_memory);
} catch (const std::exception& error) {
  std::fprintf(stderr, "llama: BUG: %s\n", error.what());
  return static_cast<int>(halfbyte::ErrorCode::bug);
}
