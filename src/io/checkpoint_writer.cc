#include "io/checkpoint_writer.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/checks.h"
#include "io/container.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace halfbyte::io {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigFile = "config.json";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr const char* kModelFile = "model.safetensors";
// Weights, in other forms too.
bool is_skipped_file(const std::string& name) {
  return name.ends_with(".safetensors") || container_of_name(name) != nullptr;
}
bool is_skipped_directory(const std::string& name) { return name.starts_with('.') || name == "original"; }

// `prefix` is the relative path of the directory, with a slash at its end.
void find_side_files(const Checkpoint::Impl& input, const std::string& prefix, SideFiles& files) {
  std::error_code error;
  std::vector<fs::directory_entry> entries;
  const fs::path directory = fs::path(input.path) / prefix;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error))
    entries.push_back(*it);
  HALFBYTE_CHECK(!error, io, "cannot list directory \"{}\": {}", printable(directory.string()),
                 error.message());
  std::ranges::sort(entries);
  for (const fs::directory_entry& entry : entries) {
    const std::string name = entry.path().filename().string(), path = prefix + name;
    fs::file_status status = entry.symlink_status(error);
    if (fs::is_symlink(status)) {
      if (!InputFile::is_cache_link(directory.string(), name)) InputFile::refuse_link(entry.path().string());
      status = entry.status(error);
    }
    HALFBYTE_CHECK(!error, io, "cannot stat \"{}\": {}", printable(entry.path().string()), error.message());
    if (fs::is_directory(status)) {
      if (is_skipped_directory(name)) {
        files.skipped.push_back(path + "/");
      } else {
        find_side_files(input, path + "/", files);
      }
    } else if (prefix.empty() &&
               (name == kConfigFile || name == kIndexFile ||
                std::ranges::find(input.files, name, &Checkpoint::Impl::File::name) != input.files.end())) {
      continue;
    } else if (!fs::is_regular_file(status) || is_skipped_file(name)) {
      files.skipped.push_back(path);
    } else {
      files.copied.push_back(path);
    }
  }
}

fs::path canonical(const std::string& path) {
  std::error_code error;
  const fs::path result = fs::weakly_canonical(fs::absolute(path, error), error);
  HALFBYTE_CHECK(!error, io, "cannot resolve \"{}\": {}", printable(path), error.message());
  return result.has_filename() ? result : result.parent_path();  // without a slash at its end
}

// Whether `path`, which need not exist, is inside of `directory`.
bool is_inside(const std::string& path, const std::string& directory) {
  const fs::path outer = canonical(directory), inner = canonical(path);
  return std::ranges::mismatch(outer, inner).in1 == outer.end();
}

}  // namespace

SideFiles find_side_files(const Checkpoint::Impl& input) {
  SideFiles files;
  if (input.is_directory) find_side_files(input, "", files);
  return files;
}

void check_output_path(const std::string& input, const std::string& output) {
  HALFBYTE_CHECK(!output.empty(), usage, "the output path is empty");
  HALFBYTE_CHECK(!same_file(input, output), usage, "output \"{}\" is the input", printable(output));
  std::error_code error;
  HALFBYTE_CHECK(!fs::is_directory(input, error) || !is_inside(output, input), usage,
                 "output \"{}\" is inside of the input \"{}\"", printable(output), printable(input));
  // Replacing it would remove the input.
  HALFBYTE_CHECK(!fs::is_directory(output, error) || !is_inside(input, output), usage,
                 "input \"{}\" is inside of the output \"{}\"", printable(input), printable(output));
}

void set_metadata(Metadata& metadata, const std::string& key, const std::string& value) {
  std::erase_if(metadata, [&](const auto& entry) { return entry.first == key; });
  metadata.emplace_back(key, value);
}

OutputFiles output_files(const Checkpoint::Impl& input, std::span<const OutputWeight* const> weights,
                         std::span<const uint64_t> num_bytes, uint64_t shard_bytes) {
  HALFBYTE_CHECK(shard_bytes == 0 || input.is_directory, usage,
                 "shard size {}: \"{}\" is a single file, and so is its output: only directories have shards",
                 shard_bytes, printable(input.path));
  OutputFiles files;
  const auto first_file = [&](const OutputWeight& weight) {
    return input.file_index(input.weights[weight.sources.front().weight]);
  };
  std::vector<std::vector<size_t>> of_input(input.files.size());
  for (size_t i = 0; i < weights.size(); ++i) of_input[first_file(*weights[i])].push_back(i);
  if (shard_bytes == 0) {
    std::vector<char> has_tensors(input.files.size());
    for (const size_t file : input.file_of) has_tensors[file] = 1;
    for (size_t i = 0; i < input.files.size(); ++i) {
      if (of_input[i].empty() && has_tensors[i]) continue;
      files.names.push_back(input.files[i].name);
      files.weights.push_back(std::move(of_input[i]));
      files.sources.push_back({i});
    }
    files.has_index = !input.index.empty();
  } else {
    uint64_t sum = 0;
    for (const auto& indices : of_input)
      for (const size_t i : indices) {
        if (files.weights.empty() || (sum > 0 && num_bytes[i] > shard_bytes - std::min(sum, shard_bytes))) {
          files.weights.emplace_back();
          files.sources.emplace_back();
          sum = 0;
        }
        files.weights.back().push_back(i);
        sum += num_bytes[i];
      }
    const size_t count = files.weights.size();
    for (size_t i = 0; i < count; ++i)
      files.names.push_back(count == 1 ? kModelFile
                                       : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, count));
    files.has_index = count > 1;
  }
  for (size_t file = 0; file < files.names.size(); ++file) {
    std::vector<size_t>& sources = files.sources[file];
    for (const size_t i : files.weights[file])
      for (const SourceRows& rows : weights[i]->sources)
        for (const int part : input.weights[rows.weight].parts) {
          const size_t source = input.file_of[static_cast<size_t>(part)];
          if (std::ranges::find(sources, source) == sources.end()) sources.push_back(source);
        }
  }
  return files;
}

OutputCheckpoint::OutputCheckpoint(const Checkpoint::Impl& input, const std::string& output, bool force,
                                   const OutputFiles& files)
    : input_(input), output_(output), force_(force), files_(files) {
  if (!input.path.empty()) check_output_path(input.path, output);
  if (input.is_directory) directory_ = std::make_unique<OutputDirectory>(output, force);
}

void OutputCheckpoint::begin_file(size_t index, std::vector<StoredTensor> tensors, const Metadata& metadata) {
  file_.reset();
  file_index_ = index;
  tensors_ = std::move(tensors);
  const SafetensorsLayout layout = lay_out_safetensors(tensors_, metadata);
  by_name_.clear();
  for (const StoredTensor& tensor : tensors_) {
    HALFBYTE_CHECK(!weight_map_.contains(tensor.name), bad_input, "tensor \"{}\" would be written twice",
                   printable(tensor.name));
    by_name_[tensor.name] = &tensor;
  }
  const std::string path = directory_ ? directory_->temporary_path() + "/" + files_.names[index] : output_;
  file_ = std::make_unique<OutputFile>(path, layout.file_bytes, force_);
  file_->write(0, std::as_bytes(std::span(layout.prefix)));
}

void OutputCheckpoint::write(const StoredTensor& tensor, uint64_t offset, std::span<const std::byte> bytes) {
  HALFBYTE_CHECK(offset <= tensor.num_bytes && bytes.size() <= tensor.num_bytes - offset, bug,
                 "bytes [{}, {} + {}) are not within tensor \"{}\" of {} bytes", offset, offset, bytes.size(),
                 printable(tensor.name), tensor.num_bytes);
  file_->write(tensor.offset + offset, bytes);
}

void OutputCheckpoint::write(const StoredTensor& tensor, const StoredRange& range,
                             std::span<const std::byte> bytes) {
  for_each_run(range, [&](uint64_t offset, uint64_t begin, uint64_t size) {
    write(tensor, offset, bytes.subspan(begin, size));
  });
}

void OutputCheckpoint::write_repeated(const StoredTensor& tensor, std::string_view content) {
  constexpr uint64_t kRunBytes = 64 * 1024;  // of a short content, written at once
  std::string run(content);
  while (!run.empty() && run.size() < std::min<uint64_t>(tensor.num_bytes, kRunBytes)) run += run;
  for (uint64_t offset = 0; offset < tensor.num_bytes; offset += run.size())
    write(tensor, offset,
          std::as_bytes(std::span(run)).first(std::min<uint64_t>(run.size(), tensor.num_bytes - offset)));
}

void OutputCheckpoint::commit_file() {
  for (const size_t source : files_.sources[file_index_]) input_.files[source].input.check_unchanged();
  file_->commit();
  file_.reset();
  for (const StoredTensor& tensor : tensors_) {
    weight_map_[tensor.name] = files_.names[file_index_];
    total_bytes_ += tensor.num_bytes;
  }
}

std::string OutputCheckpoint::index_text() const {
  nlohmann::json index = nlohmann::json::object();
  if (!input_.index.empty()) index = parse_json<nlohmann::json>(input_.index, kIndexFile);
  if (!index["metadata"].is_object()) index["metadata"] = nlohmann::json::object();
  index["metadata"]["total_size"] = total_bytes_;
  index["weight_map"] = weight_map_;
  return index.dump(2) + "\n";
}

void OutputCheckpoint::write_text(const std::string& name, const std::string& text) {
  OutputFile file(directory_->temporary_path() + "/" + name, text.size(), false);
  file.write(0, std::as_bytes(std::span(text)));
  file.commit();
}

void OutputCheckpoint::copy_file(const std::string& name) {
  const fs::path target = fs::path(directory_->temporary_path()) / name;
  std::error_code error;
  fs::create_directories(target.parent_path(), error);
  HALFBYTE_CHECK(!error, io, "cannot make directory \"{}\": {}", printable(target.parent_path().string()),
                 error.message());
  const fs::path source = fs::path(input_.path) / name;
  const InputFile from = InputFile::open_beneath(source.parent_path().string(), source.filename().string());
  OutputFile to(target.string(), from.size(), false);
  Buffer buffer;
  for (uint64_t offset = 0; offset < from.size();) {
    const uint64_t count = std::min<uint64_t>(from.size() - offset, kCopyBytes);
    const std::span<std::byte> bytes(buffer.reserve(kCopyBytes), count);
    from.read(offset, bytes);
    to.write(offset, bytes);
    offset += count;
  }
  from.check_unchanged();
  to.commit();
}

void OutputCheckpoint::finish(const SideFiles& side_files, const std::string& config,
                              const std::map<std::string, std::string>& texts) {
  if (!directory_) return;
  for (const std::string& name : side_files.copied) copy_file(name);
  if (files_.has_index) write_text(kIndexFile, index_text());
  for (const auto& [name, text] : texts) write_text(name, text);
  if (!config.empty()) write_text(kConfigFile, config);  // last: it says what the rest is
  directory_->commit();
}

}  // namespace halfbyte::io
