#include "io/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/format.h"
#include "core/words.h"
#include "io/architecture.h"
#include "io/columnwise.h"
#include "io/config.h"
#include "io/container.h"
#include "io/foreign.h"
#include "io/limits.h"
#include "io/progress.h"
#include "io/safetensors.h"
#include "io/shard_index.h"
#include "io/verify_span.h"

namespace halfbyte {

using io::printable;

namespace io {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAdapterConfigFile = "adapter_config.json";
// Of other tools; config.json can say the same.
constexpr const char* kQuantizationConfigFiles[] = {"hf_quant_config.json", "quantize_config.json",
                                                    "quant_config.json"};

void add_file(Checkpoint::Impl& checkpoint, const std::string& name, InputFile input, const Stop& stop) {
  SafetensorsHeader header = read_safetensors_header(input, name, stop);
  HALFBYTE_CHECK(checkpoint.tensors.size() + header.tensors.size() <= kMaxModelTensors, bad_input,
                 "\"{}\" has more than {} tensors", printable(checkpoint.path), kMaxModelTensors);
  for (StoredTensor& tensor : header.tensors) checkpoint.tensors.push_back(std::move(tensor));
  checkpoint.file_of.resize(checkpoint.tensors.size(), checkpoint.files.size());
  checkpoint.files.push_back({name, std::move(input), std::move(header.metadata)});
}

void add_shards(Checkpoint::Impl& checkpoint, const ShardIndex& index, const Stop& stop) {
  std::map<std::string, std::string> shards;  // in lower case -> as written
  for (const std::string& file : index.files) {
    const auto [shard, added] = shards.emplace(lower_case(file), file);
    HALFBYTE_CHECK(added, bad_input, "{}: files \"{}\" and \"{}\" differ by case only", kIndexFile,
                   printable(shard->second), printable(file));
  }
  for (const auto& [key, file] : shards)
    add_file(checkpoint, file, InputFile::open_beneath(checkpoint.path, file), stop);
}

// The files must hold what the index says, no more and no less.
void check_index(const Checkpoint::Impl& checkpoint, const ShardIndex& index) {
  std::vector<const ShardIndex::Entry*> listed(checkpoint.tensors.size());
  const ShardIndex::Entry* missing = nullptr;
  for (const ShardIndex::Entry& entry : index.entries) {
    const auto tensor = checkpoint.by_name.find(index.name(entry));
    if (tensor != checkpoint.by_name.end()) {
      listed[static_cast<size_t>(tensor->second)] = &entry;
    } else if (missing == nullptr) {
      missing = &entry;
    }
  }
  for (size_t i = 0; i < listed.size(); ++i) {
    const StoredTensor& tensor = checkpoint.tensors[i];
    HALFBYTE_CHECK(listed[i] != nullptr, bad_input, "{}: tensor \"{}\" of {} is not listed", kIndexFile,
                   printable(tensor.name), printable(tensor.file));
    const std::string& file = index.files[listed[i]->file];
    HALFBYTE_CHECK(file == tensor.file, bad_input, "{}: tensor \"{}\" is listed in {} but is in {}",
                   kIndexFile, printable(tensor.name), printable(file), printable(tensor.file));
  }
  if (missing != nullptr)
    HALFBYTE_FAIL(bad_input, "{}: tensor \"{}\" is not in {}", kIndexFile, printable(index.name(*missing)),
                  printable(index.files[missing->file]));
}

void index_tensors(Checkpoint::Impl& checkpoint) {
  for (size_t i = 0; i < checkpoint.tensors.size(); ++i) {
    const StoredTensor& tensor = checkpoint.tensors[i];
    const auto [other, added] = checkpoint.by_name.emplace(tensor.name, static_cast<int>(i));
    HALFBYTE_CHECK(added, bad_input, "tensor \"{}\" is in {} and in {}", printable(tensor.name),
                   printable(checkpoint.tensors[static_cast<size_t>(other->second)].file),
                   printable(tensor.file));
  }
}

// A directory without safetensors: says what there is instead.
[[noreturn]] void refuse_directory(const std::string& path, const std::vector<std::string>& names) {
  std::string instead;
  const auto other = std::ranges::find_if(names, [](const auto& name) { return container_of_name(name); });
  if (other != names.end()) {
    const Container& container = *container_of_name(*other);
    instead = fmt::format("; \"{}\" is {}: {}", printable(*other), container.what, container.advice);
  } else if (std::ranges::binary_search(names, "snapshots")) {
    instead =
        "; this is a repository in the cache of the Hugging Face hub: give a directory in its snapshots/";
  }
  HALFBYTE_FAIL(bad_input, "directory \"{}\" has no .safetensors file{}", printable(path), instead);
}

void open_directory(Checkpoint::Impl& checkpoint, const Stop& stop) {
  const std::vector<std::string> names = list_directory(checkpoint.path);
  const auto has = [&](const char* name) { return std::ranges::binary_search(names, name); };
  const auto text_of = [&](const char* name, uint64_t max_bytes) {
    checkpoint.text_files.push_back(InputFile::open_beneath(checkpoint.path, name));
    return read_text(checkpoint.text_files.back(), max_bytes);
  };
  if (has(kConfigFile)) checkpoint.config = text_of(kConfigFile, kMaxConfigBytes);
  for (const char* name : kQuantizationConfigFiles)
    if (has(name)) checkpoint.quantization_configs[name] = text_of(name, kMaxConfigBytes);
  if (has(kIndexFile)) {
    ShardIndex index = parse_shard_index(text_of(kIndexFile, kMaxIndexBytes), stop);
    checkpoint.index = std::move(index.rest);
    // Some tools would read one, some the other.
    const bool listed = std::ranges::find(index.files, kModelFile) != index.files.end();
    HALFBYTE_CHECK(!has(kModelFile) || listed, bad_input,
                   "directory \"{}\" has both {} and an index that does not list it",
                   printable(checkpoint.path), kModelFile);
    add_shards(checkpoint, index, stop);
    index_tensors(checkpoint);
    check_index(checkpoint, index);
    return;
  }
  std::vector<std::string> models;
  for (const std::string& name : names)
    if (name.ends_with(".safetensors")) models.push_back(name);
  if (has(kModelFile)) models = {kModelFile};
  checkpoint.has_adapter_config = has(kAdapterConfigFile) && !has(kModelFile);
  if (models.empty()) refuse_directory(checkpoint.path, names);
  HALFBYTE_CHECK(models.size() == 1, bad_input,
                 "directory \"{}\" has {} .safetensors files but no {}: \"{}\", \"{}\"{}",
                 printable(checkpoint.path), models.size(), kIndexFile, printable(models[0]),
                 printable(models[1]), models.size() > 2 ? ", ..." : "");
  add_file(checkpoint, models[0], InputFile::open_beneath(checkpoint.path, models[0]), stop);
  index_tensors(checkpoint);
}

void check_shape(const QuantizedWeight& weight) {
  const auto fail = [&] {
    HALFBYTE_FAIL(bad_input, "weight \"{}\" has an impossible shape [{}]", printable(weight.name),
                  fmt::join(weight.shape, ", "));
  };
  if (weight.shape.empty() || weight.shape.size() > kMaxRank) fail();
  int64_t product = 1;
  for (const int64_t extent : weight.shape)
    if (extent < 0 || __builtin_mul_overflow(product, std::max<int64_t>(extent, 1), &product) ||
        product > kMaxElements)
      fail();
}

// Finds the parts of a quantized weight, whose shape is that which the model sees.
Weight make_weight(const Checkpoint::Impl& checkpoint, StoredWeight& stored, std::vector<char>& used) {
  const QuantizedWeight& quantized = stored.weight;
  check_shape(quantized);
  Weight weight{quantized.name, quantized.shape, quantized.dtype, quantized.layout, quantized.spec, {}, 0};
  weight.scale_rows = quantized.scale_rows;
  weight.note = quantized.note;
  weight.shape = stored.model_shape();
  for (const Part& part : parts_of(quantized)) {
    const auto found = checkpoint.by_name.find(part.name);
    HALFBYTE_CHECK(found != checkpoint.by_name.end(), bad_input,
                   "weight \"{}\" in layout {} has no tensor \"{}\"", printable(quantized.name),
                   to_string(quantized.layout), printable(part.name));
    const auto index = static_cast<size_t>(found->second);
    const StoredTensor& tensor = checkpoint.tensors[index];
    const bool shape_fits = part.role == Role::constant || tensor.shape == part.shape;
    HALFBYTE_CHECK(
        tensor.dtype == part.dtype && shape_fits, bad_input,
        "tensor \"{}\" does not fit weight \"{}\" [{}] in layout {}: it must be {} [{}], not {} [{}]",
        printable(tensor.name), printable(quantized.name), fmt::join(quantized.shape, ", "),
        to_string(quantized.layout), part.dtype, fmt::join(part.shape, ", "), tensor.dtype,
        fmt::join(tensor.shape, ", "));
    HALFBYTE_CHECK(!used[index], bad_input, "tensor \"{}\" belongs to two quantized weights",
                   printable(tensor.name));
    used[index] = 1;
    if (part.role != Role::constant) stored.parts[static_cast<size_t>(part.role)] = &tensor;
    weight.parts.push_back(found->second);
    weight.num_bytes += tensor.num_bytes;
  }
  for (const std::string& name : quantized.others) {
    const int index = checkpoint.by_name.at(name);
    used[static_cast<size_t>(index)] = 1;
    weight.parts.push_back(index);
    weight.num_bytes += checkpoint.tensors[static_cast<size_t>(index)].num_bytes;
  }
  return weight;
}

void find_transposed(Checkpoint::Impl& checkpoint) {
  std::optional<Architecture> architecture;
  for (StoredWeight& stored : checkpoint.quantized)
    stored.transposed = layout_info(stored.weight.layout).turns_experts;
  const auto may_be = [](const StoredWeight& stored) {
    return layout_info(stored.weight.layout).turns_conv1d && stored.weight.shape.size() == 2;
  };
  if (!checkpoint.config.empty() && std::ranges::any_of(checkpoint.quantized, may_be))
    architecture = Architecture::find(config_json(checkpoint.config));
  if (!architecture) return;
  for (StoredWeight& stored : checkpoint.quantized) {
    if (!may_be(stored)) continue;
    const std::optional<ModuleInfo> module = architecture->find_tensor(stored.weight.name);
    stored.transposed = module && module->kind == ModuleKind::conv1d;
  }
}

// Of config.json, or of the metadata of a file that stands alone.
std::optional<DType> find_model_dtype(const Checkpoint::Impl& checkpoint) {
  if (!checkpoint.config.empty()) return dtype_of_config(checkpoint.config);
  for (const auto& [key, value] : checkpoint.files.front().metadata) try {
      if (key == kWordMetadata)
        if (const auto config = word_config(value, "__metadata__: " + key)) return config->dtype;
    } catch (const Error&) {
      // The tensors tell the rest.
    }
  return std::nullopt;
}

void make_weights(Checkpoint::Impl& checkpoint) {
  checkpoint.model_dtype = find_model_dtype(checkpoint).value_or(DType::bf16);
  FoundWeights found;
  for (const LayoutInfo* layout : all_layouts()) layout->match(checkpoint, found);
  for (QuantizedWeight& weight : found.weights) checkpoint.quantized.push_back({std::move(weight)});
  checkpoint.not_read = std::move(found.not_read);
  find_transposed(checkpoint);

  struct Entry {
    Weight weight;
    int quantized;
  };
  std::vector<Entry> entries;
  std::vector<char> used(checkpoint.tensors.size(), 0);
  for (size_t i = 0; i < checkpoint.quantized.size(); ++i)
    entries.push_back({make_weight(checkpoint, checkpoint.quantized[i], used), static_cast<int>(i)});
  for (size_t i = 0; i < checkpoint.tensors.size(); ++i) {
    const StoredTensor& tensor = checkpoint.tensors[i];
    if (used[i]) continue;
    entries.push_back({{tensor.name,
                        tensor.shape,
                        dtype_from_safetensors(tensor.dtype),
                        {},
                        {},
                        {static_cast<int>(i)},
                        tensor.num_bytes},
                       -1});
  }
  const auto name_of = [](const Entry& entry) -> const std::string& { return entry.weight.name; };
  std::ranges::sort(entries, {}, name_of);
  const auto twice = std::ranges::adjacent_find(entries, {}, name_of);
  HALFBYTE_CHECK(twice == entries.end(), bad_input,
                 "weight \"{}\" is there twice: quantized and dense, or in two layouts",
                 printable(twice->weight.name));
  for (Entry& entry : entries) {
    checkpoint.weights.push_back(std::move(entry.weight));
    checkpoint.quantized_of.push_back(entry.quantized);
  }
}

template <class Body>
void with_type(DType dtype, const Body& body) {
  using formats::ScaleType;
  switch (scale_type(dtype)) {
    case ScaleType::f32:
      return body(std::integral_constant<ScaleType, ScaleType::f32>());
    case ScaleType::f16:
      return body(std::integral_constant<ScaleType, ScaleType::f16>());
    case ScaleType::bf16:
      return body(std::integral_constant<ScaleType, ScaleType::bf16>());
    case ScaleType::f64:
      return body(std::integral_constant<ScaleType, ScaleType::f64>());
    default:
      HALFBYTE_FAIL(bug, "no weight has elements of {}", to_string(dtype));
  }
}

// Reads what a block has in the part of this role into its native buffer.
void read_part(const Checkpoint::Impl& checkpoint, const StoredWeight& quantized, const Block& block,
               Role role, BlockWorker& worker) {
  const StoredRange range = stored_range(quantized.weight, block, role);
  std::byte* stored = worker.stored.reserve(static_cast<int64_t>(range.num_bytes()));
  checkpoint.read(quantized.part(role), range, {stored, range.num_bytes()});
  to_native(quantized.weight, block, role, stored, worker.native.of(role).data());
}

void read_quantized_scales(const Checkpoint::Impl& checkpoint, const StoredWeight& quantized,
                           const Block& block, BlockWorker& worker) {
  // From the last scale that begins a block of scales.
  const int64_t first = block.first_group / kDoubleQuantBlock * kDoubleQuantBlock;
  const int64_t count = block.first_group + block.shape.num_groups - first;
  std::vector<float> absmax(static_cast<size_t>((count + kDoubleQuantBlock - 1) / kDoubleQuantBlock));
  std::vector<float> scales(static_cast<size_t>(count));
  std::byte* codes = worker.stored.reserve(count);
  checkpoint.read(quantized.part(Role::scales), static_cast<uint64_t>(first),
                  {codes, static_cast<size_t>(count)});
  checkpoint.read(quantized.part(Role::scales_absmax),
                  static_cast<uint64_t>(first / kDoubleQuantBlock) * sizeof(float),
                  std::as_writable_bytes(std::span(absmax)));
  const std::vector<float>& map = quantized.weight.scales_map;
  double_dequantize({reinterpret_cast<uint8_t*>(codes), absmax.data(), quantized.weight.scales_offset}, count,
                    scales.data(), map.empty() ? nullptr : map.data());
  std::memcpy(worker.native.scales.data(), scales.data() + (block.first_group - first),
              static_cast<size_t>(block.shape.num_groups) * sizeof(float));
}

}  // namespace

void convert_elements(const std::byte* from, DType from_dtype, int64_t count, std::byte* to, DType to_dtype) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(count * size_of(to_dtype)));
    return;
  }
  if (to_dtype == DType::f32 && from_dtype == DType::f16)
    return widen_f16(from, count, reinterpret_cast<float*>(to));
  if (to_dtype == DType::f32 && from_dtype == DType::bf16)
    return widen_bf16(from, count, reinterpret_cast<float*>(to));
  with_type(from_dtype, [&](auto from_type) {
    with_type(to_dtype, [&](auto to_type) {
      constexpr bool kWide = from_type() == formats::ScaleType::f64 || to_type() == formats::ScaleType::f64;
      using Wide = std::conditional_t<kWide, double, float>;
      for (int64_t i = 0; i < count; ++i)
        formats::store_scale(to, i, formats::load_scale<Wide>(from, i, from_type()), to_type());
    });
  });
}

float read_f32(const Checkpoint::Impl& checkpoint, const std::string& name, const std::string& what) {
  const StoredTensor* tensor = checkpoint.find(name);
  HALFBYTE_CHECK(tensor != nullptr && tensor->dtype == "F32" && tensor->num_bytes == sizeof(float), bad_input,
                 "{}: no \"{}\" of one F32 beside it", what, printable(name));
  float value = 0;
  checkpoint.read(*tensor, 0, std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

int64_t num_elements(std::span<const int64_t> shape) {
  if (std::ranges::find(shape, 0) != shape.end()) return 0;  // the others may overflow
  int64_t product = 1;
  for (const int64_t extent : shape) product *= extent;
  return product;
}

std::unique_ptr<Checkpoint::Impl> open_tensors(const std::string& path, const Stop& stop) {
  auto impl = std::make_unique<Checkpoint::Impl>();
  impl->path = path;
  impl->is_directory = is_directory(path);
  if (impl->is_directory) {
    open_directory(*impl, stop);
  } else {
    add_file(*impl, path.substr(path.rfind('/') + 1), InputFile::open(path), stop);
    index_tensors(*impl);
  }
  impl->fp8_block = fp8_block_of_config(impl->config);
  return impl;
}

std::unique_ptr<Checkpoint::Impl> open_checkpoint(const std::string& path, const Stop& stop) {
  auto impl = open_tensors(path, stop);
  make_weights(*impl);
  find_foreign(*impl);
  impl->check_unchanged();  // what was read is of one moment
  return impl;
}

namespace {

// Codes that no format has: the upper halves of f16. In f32, as dequantize() computes.
void decode_e5m2(const QuantizedWeight& weight, const Block& block, const NativeBuffers& native, DType dtype,
                 std::byte* out) {
  const QuantSpec& spec = weight.spec;
  const int64_t groups = block.shape.groups_per_row;
  const auto type = scale_type(spec.scale_dtype);
  std::vector<float> values(static_cast<size_t>(block.cols));
  for (int64_t row = 0; row < block.rows; ++row) {
    for (int64_t col = 0; col < block.cols; ++col) {
      const int64_t group = spec.granularity == Granularity::group ? col / spec.group_size : 0;
      const int64_t index = spec.granularity == Granularity::tensor ? 0 : row * groups + group;
      const int code = std::to_integer<int>(native.codes.data()[row * block.cols + col]);
      values[static_cast<size_t>(col)] = formats::f16_to_f32(static_cast<uint16_t>(code << 8)) *
                                         formats::load_scale<float>(native.scales.data(), index, type);
    }
    convert_elements(reinterpret_cast<const std::byte*>(values.data()), DType::f32, block.cols,
                     out + row * block.cols * size_of(dtype), dtype);
  }
}

}  // namespace

void decode_block(const Checkpoint::Impl& checkpoint, const StoredWeight& quantized, const Block& block,
                  BlockWorker& worker, const TensorView& y) {
  const QuantizedView view = native_view(quantized.weight, block, worker.native);
  for (const Role role : block_roles(quantized.weight.spec)) {
    const Stopwatch reading(worker.read_seconds);
    if (role == Role::scales && quantized.weight.spec.double_quant)
      read_quantized_scales(checkpoint, quantized, block, worker);
    else
      read_part(checkpoint, quantized, block, role, worker);
  }
  if (quantized.weight.e5m2_codes) {
    const bool on_cpu = y.device.kind == DeviceKind::cpu;  // otherwise y is the mirror of worker.dense
    decode_e5m2(quantized.weight, block, worker.native, y.dtype,
                on_cpu ? static_cast<std::byte*>(y.data) : worker.dense.data());
    if (!on_cpu) worker.transfer([&] { worker.dense.upload(worker.stream); });
    return;
  }
  worker.transfer([&] {
    for (const Role role : block_roles(quantized.weight.spec)) worker.native.of(role).upload(worker.stream);
    if (has_global_scale(quantized.weight.spec)) worker.native.global_scale.upload(worker.stream);
  });
  dequantize(view, y, worker.execution());
}

void Decoder::decode(const Weight& weight, int64_t begin, int64_t count, DType dtype, std::byte* out) {
  const StoredWeight* quantized = checkpoint_.quantized_weight(weight);
  if (quantized == nullptr) return decode_dense(weight, begin, count, dtype, out);
  if (quantized->transposed) return decode_transposed(*quantized, begin, count, dtype, out);
  decode_stored(*quantized, begin, count, dtype, out);
}

// Each column [in] of the range is a run of a row of what is stored, in each of its matrices.
void Decoder::decode_transposed(const StoredWeight& quantized, int64_t begin, int64_t count, DType dtype,
                                std::byte* out) {
  const std::vector<int64_t>& shape = quantized.weight.shape;
  const int64_t in = shape.back(), cols = shape[shape.size() - 2], size = size_of(dtype), matrix = in * cols;
  for (const int64_t end = begin + count; begin < end;) {
    const int64_t first = begin / matrix * matrix, low = begin - first, high = std::min(end - first, matrix);
    for (int64_t column = 0; column < cols; ++column) {
      const RowRange rows = rows_of_column(low, high, column, cols);
      std::byte* const run = column_.reserve((rows.end - rows.begin) * size);
      decode_stored(quantized, first + column * in + rows.begin, rows.end - rows.begin, dtype, run);
      for (int64_t row = rows.begin; row < rows.end; ++row)
        std::memcpy(out + (row * cols + column - low) * size, run + (row - rows.begin) * size,
                    static_cast<size_t>(size));
    }
    out += (high - low) * size;
    begin = first + high;
  }
}

void Decoder::decode_stored(const StoredWeight& quantized, int64_t begin, int64_t count, DType dtype,
                            std::byte* out) {
  const int64_t size = size_of(dtype), end = begin + count;
  while (begin < end) {
    const Block block = block_at(quantized.weight, begin,
                                 std::min(preferred_elements(quantized.weight, kBlockElements), end - begin));
    const int64_t skip = begin - block.begin, taken = std::min(block.count - skip, end - begin);
    std::byte* decoded = taken == block.count ? out : worker_.dense.reserve(block.count * size);
    decode_block(checkpoint_, quantized, block, worker_, {decoded, dtype, {block.rows, block.cols}, {}, {}});
    restore_columns(quantized.weight, decoded, block.rows, size);
    if (decoded != out) std::memcpy(out, decoded + skip * size, static_cast<size_t>(taken * size));
    out += taken * size;
    begin += taken;
  }
}

void Decoder::decode_dense(const Weight& weight, int64_t begin, int64_t count, DType dtype, std::byte* out) {
  const StoredTensor& tensor = checkpoint_.tensors[static_cast<size_t>(weight.parts.front())];
  const int64_t source_size = size_of(*weight.dtype), size = size_of(dtype);
  for (int64_t done = 0; done < count;) {
    const int64_t chunk = std::min(count - done, kBlockElements);
    const auto offset = static_cast<uint64_t>((begin + done) * source_size);
    const auto num_bytes = static_cast<size_t>(chunk * source_size);
    if (dtype == *weight.dtype) {
      checkpoint_.read(tensor, offset, {out + done * size, num_bytes});
    } else {
      std::byte* stored = worker_.stored.reserve(chunk * source_size);
      checkpoint_.read(tensor, offset, {stored, num_bytes});
      convert_elements(stored, *weight.dtype, chunk, out + done * size, dtype);
    }
    done += chunk;
  }
}

}  // namespace io

std::vector<int64_t> io::StoredWeight::model_shape() const {
  std::vector<int64_t> shape = weight.shape;
  if (transposed) std::swap(shape[shape.size() - 2], shape[shape.size() - 1]);
  return shape;
}

const io::StoredWeight* Checkpoint::Impl::quantized_weight(const Weight& weight) const {
  const int index = quantized_of[static_cast<size_t>(&weight - weights.data())];
  return index < 0 ? nullptr : &quantized[static_cast<size_t>(index)];
}

const StoredTensor* Checkpoint::Impl::find(const std::string& name) const {
  const auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : &tensors[static_cast<size_t>(found->second)];
}

void Checkpoint::Impl::check_unchanged() const {
  for (const io::InputFile& file : text_files) file.check_unchanged();
  for (const File& file : files) file.input.check_unchanged();
}

void Checkpoint::Impl::check_unchanged(const Weight& weight) const {
  for (const io::InputFile& file : text_files) file.check_unchanged();
  const io::InputFile* checked = nullptr;
  for (const int part : weight.parts) {
    const io::InputFile& input = files[file_of[static_cast<size_t>(part)]].input;
    if (&input != checked) input.check_unchanged();
    checked = &input;
  }
}

const std::string& Checkpoint::Impl::config_text(const std::string& file) const {
  if (file == io::kConfigFile) return config;
  static const auto& none = *new std::string;
  const auto found = quantization_configs.find(file);
  return found == quantization_configs.end() ? none : found->second;
}

void Checkpoint::Impl::read(const StoredTensor& tensor, uint64_t offset, std::span<std::byte> bytes) const {
  const auto found = by_name.find(tensor.name);
  HALFBYTE_CHECK(found != by_name.end(), usage, "read: no tensor \"{}\"", printable(tensor.name));
  const auto index = static_cast<size_t>(found->second);
  const StoredTensor& own = tensors[index];
  HALFBYTE_CHECK(offset <= own.num_bytes && bytes.size() <= own.num_bytes - offset, usage,
                 "read: bytes [{}, {} + {}) are not within tensor \"{}\" of {} bytes", offset, offset,
                 bytes.size(), printable(own.name), own.num_bytes);
  files[file_of[index]].input.read(own.offset + offset, bytes);
}

void Checkpoint::Impl::read(const StoredTensor& tensor, const io::StoredRange& range,
                            std::span<std::byte> bytes) const {
  if (io::has_short_runs(range))
    return whole_tensors->read(
        tensor, range, [&](uint64_t offset, std::span<std::byte> part) { read(tensor, offset, part); },
        bytes);
  io::for_each_run(range, [&](uint64_t offset, uint64_t begin, uint64_t size) {
    read(tensor, offset, bytes.subspan(begin, size));
  });
}

uint64_t Checkpoint::Impl::whole_bytes() const {
  uint64_t all = 0, largest = 0;
  for (const io::StoredWeight& stored : quantized) {
    if (!io::is_columnwise(stored.weight)) continue;
    all += stored.part(io::Role::codes).num_bytes;
    largest = std::max(largest, stored.part(io::Role::codes).num_bytes);
  }
  return std::min(all, io::WholeTensors::kMostBytes + largest);
}

std::string Checkpoint::Impl::read_text(const StoredTensor& tensor) const {
  HALFBYTE_CHECK(tensor.num_bytes <= io::kMaxDescriptionBytes, bad_input,
                 "tensor \"{}\" has {} bytes, more than {}", printable(tensor.name), tensor.num_bytes,
                 io::kMaxDescriptionBytes);
  std::string text(tensor.num_bytes, '\0');
  read(tensor, 0, std::as_writable_bytes(std::span(text)));
  return text;
}

Checkpoint Checkpoint::open(const std::string& path, const ProgressFunction& progress) {
  return Checkpoint(io::open_checkpoint(path, io::stop_of(progress)));
}

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

bool Checkpoint::is_directory() const { return impl_->is_directory; }
std::span<const StoredTensor> Checkpoint::tensors() const { return impl_->tensors; }
std::span<const Weight> Checkpoint::weights() const { return impl_->weights; }
std::span<const ForeignQuantization> Checkpoint::foreign() const { return impl_->foreign; }

const Weight* Checkpoint::find(std::string_view name) const {
  const auto weight = std::ranges::lower_bound(impl_->weights, name, {}, &Weight::name);
  return weight != impl_->weights.end() && weight->name == name ? &*weight : nullptr;
}

void Checkpoint::read(const StoredTensor& tensor, uint64_t offset, std::span<std::byte> bytes) const {
  impl_->read(tensor, offset, bytes);
}

void Checkpoint::decode(const Weight& weight, int64_t begin, int64_t count, DType dtype, void* out) const {
  const Weight* own = find(weight.name);
  HALFBYTE_CHECK(own != nullptr, usage, "decode: no weight \"{}\"", printable(weight.name));
  HALFBYTE_CHECK(own->dtype && is_floating(*own->dtype), usage,
                 "decode: weight \"{}\" is {}, not f32, f16, bf16 or f64", printable(own->name),
                 impl_->tensors[static_cast<size_t>(own->parts.front())].dtype);
  HALFBYTE_CHECK(is_floating(dtype), usage, "decode: dtype must be f32, f16, bf16 or f64, got {}",
                 to_string(dtype));
  const int64_t n = io::num_elements(*own);
  HALFBYTE_CHECK(begin >= 0 && count >= 0 && begin <= n && count <= n - begin, usage,
                 "decode: elements [{}, {} + {}) are not within weight \"{}\" of {}", begin, begin, count,
                 printable(own->name), n);
  io::Decoder(*impl_).decode(*own, begin, count, dtype, static_cast<std::byte*>(out));
}

double bits_per_weight(const Weight& weight) {
  const int64_t n = io::num_elements(weight);
  return n == 0 ? 0 : 8 * static_cast<double>(weight.num_bytes) / static_cast<double>(n);
}

}  // namespace halfbyte
