#include "io/checkpoint_writer.h"

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>

#include "core/checks.h"
#include "core/directory.h"
#include "core/temporary.h"
#include "cpu/parallel.h"
#include "halfbyte/output.hpp"
#include "halfbyte/version.hpp"
#include "io/config.h"
#include "io/container.h"
#include "io/journal.h"
#include "io/limits.h"
#include "io/shard_index.h"

namespace halfbyte::io {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Weights, in other forms too, and what is not complete.
bool is_skipped_file(const std::string& name) {
  return name.ends_with(".safetensors") || container_of_name(name) != nullptr || is_temporary_name(name);
}
bool is_skipped_directory(const std::string& name) { return name.starts_with('.') || name == "original"; }

// `own`: files of the model itself, in its directory. `prefix` is the relative path of a directory, with a
// slash at its end.
void add_side_files(const Checkpoint::Impl& input, const std::set<std::string_view>& own,
                    const std::string& prefix, SideFiles& files) {
  std::error_code error;
  const std::string directory = join(input.path, prefix);
  for (const std::string& name : list_directory(directory)) {
    const std::string path = prefix + name;
    const std::string entry = join(directory, name);
    fs::file_status status = fs::symlink_status(entry, error);
    if (fs::is_symlink(status)) {
      if (!InputFile::is_cache_link(directory, name)) InputFile::refuse_link(entry);
      status = fs::status(entry, error);
    }
    HALFBYTE_CHECK(!error, io, "cannot stat \"{}\": {}", printable(entry), error.message());
    if (fs::is_directory(status)) {
      if (is_skipped_directory(name)) {
        files.skipped.push_back(path + "/");
      } else {
        add_side_files(input, own, path + "/", files);
      }
    } else if (prefix.empty() && own.contains(name)) {
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
  std::set<std::string_view> own = {kConfigFile, kIndexFile};
  for (const Checkpoint::Impl::File& file : input.files) own.insert(file.name);
  if (input.is_directory) add_side_files(input, own, "", files);
  return files;
}

void check_output_path(const std::string& input, const std::string& output) {
  HALFBYTE_CHECK(!output.empty(), usage, "the output path is empty");
  HALFBYTE_CHECK(!same_file(input, output), usage, "output \"{}\" is the input", printable(output));
  HALFBYTE_CHECK(!is_directory(input) || !is_inside(output, input), usage,
                 "output \"{}\" is inside of the input \"{}\"", printable(output), printable(input));
  // Replacing it would remove the input.
  HALFBYTE_CHECK(!is_directory(output) || !is_inside(input, output), usage,
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
  std::vector<size_t> used_by(input.files.size(), SIZE_MAX);  // the last output file that each is a source of
  for (size_t file = 0; file < files.names.size(); ++file) {
    std::vector<size_t>& sources = files.sources[file];
    for (const size_t source : sources) used_by[source] = file;
    for (const size_t i : files.weights[file])
      for (const SourceRows& rows : weights[i]->sources)
        for (const int part : input.weights[rows.weight].parts) {
          const size_t source = input.file_of[static_cast<size_t>(part)];
          if (used_by[source] != file) sources.push_back(source);
          used_by[source] = file;
        }
  }
  return files;
}

void check_output(const Checkpoint::Impl& input, const OutputFiles& files,
                  const std::function<FileContent(size_t file)>& content) {
  std::vector<std::pair<std::string, size_t>> file_of;  // of each tensor
  for (size_t file = 0; file < files.names.size(); ++file) {
    FileContent planned = content(file);
    try {
      lay_out_safetensors(planned.tensors, planned.metadata);
    } catch (const Error& error) {
      throw Error(error.code(),
                  fmt::format("output file \"{}\" cannot be written so that it can be read: {}{}",
                              printable(files.names[file]), error.what(),
                              input.is_directory ? "; smaller files (--shard-size) hold less each" : ""));
    }
    for (StoredTensor& tensor : planned.tensors) file_of.emplace_back(std::move(tensor.name), file);
  }
  HALFBYTE_CHECK(file_of.size() <= kMaxModelTensors, bad_input,
                 "the output would have {} tensors, more than the limit of {}", file_of.size(),
                 kMaxModelTensors);
  if (!files.has_index) return;
  std::ranges::sort(file_of);
  std::vector<std::pair<std::string_view, std::string_view>> names;
  for (const auto& [tensor, file] : file_of) names.emplace_back(tensor, files.names[file]);
  shard_index_text(input.index, UINT64_MAX, names);  // no number of bytes is longer
}

uint64_t file_bytes(FileContent content) {
  return lay_out_safetensors(content.tensors, content.metadata).file_bytes;
}

std::vector<int> deal_files(std::span<const uint64_t> num_bytes, int num_processes) {
  std::vector<size_t> files(num_bytes.size());
  std::iota(files.begin(), files.end(), size_t{0});
  std::ranges::stable_sort(files, std::greater(), [&](size_t file) { return num_bytes[file]; });
  std::vector<uint64_t> sums(static_cast<size_t>(num_processes));
  std::vector<int> owner(num_bytes.size());
  for (const size_t file : files) {
    const auto least = std::ranges::min_element(sums);
    *least += num_bytes[file];
    owner[file] = static_cast<int>(least - sums.begin());
  }
  return owner;
}

OutputCheckpoint::OutputCheckpoint(const Checkpoint::Impl& input, const std::string& output, bool force,
                                   const OutputFiles& files, const SideFiles& side_files,
                                   ProgressReporter& reporter, const Resumption& resumption, Team& team)
    : input_(input),
      output_(output),
      force_(force),
      files_(files),
      side_files_(side_files),
      reporter_(reporter),
      num_threads_(resumption.num_threads),
      team_(team) {
  if (!input.path.empty()) check_output_path(input.path, output);
  // Of one file there is nothing to go on with.
  if (files.names.size() > 1 && !resumption.identity.is_null()) {
    identity_ = std::make_unique<Json>(resumption.identity);
    (*identity_)["version"] = kVersion;
    (*identity_)["source"] = source_identity(input, side_files.copied);
  }
  if (team_.leads()) {
    std::unique_ptr<LockedDirectory> unfinished;
    if (resumption.unfinished == Unfinished::resume && identity_)
      unfinished = take_unfinished();
    else
      remove_leftovers(output, resumption.unfinished == Unfinished::discard);
    if (input.is_directory)
      directory_ = std::make_unique<OutputDirectory>(output, force, side_files.copied, std::move(unfinished));
  }
}

// The process that leads says where the output is made, if others can take a part of it.
void OutputCheckpoint::join_team() {
  std::string path;
  if (team_.leads() && identity_) {
    if (!journal_) begin_journal();
    directory_->locked().share();
    path = fs::absolute(directory_->locked().path()).string();
  }
  path = team_.meet(path).front();
  if (team_.leads() || path.empty()) return;
  std::string why_not;
  auto joined = LockedDirectory::join(path, why_not);
  HALFBYTE_CHECK(joined, io,
                 "cannot work in \"{}\", where another process makes the output: {} (all must see it)",
                 printable(path), why_not);
  directory_ = std::make_unique<OutputDirectory>(output_, std::move(joined));
  earlier_ = Journal::open(path);
}

OutputCheckpoint::~OutputCheckpoint() = default;

// Of what earlier runs left, that which this run can go on with, the one with the most files; null: there is
// none.
std::unique_ptr<LockedDirectory> OutputCheckpoint::take_unfinished() {
  std::unique_ptr<LockedDirectory> taken;
  std::string refused;
  ErrorCode code = ErrorCode::usage;
  for (const Leftover& leftover : remove_leftovers(output_)) {
    if (!leftover.unfinished) continue;
    std::string why;
    auto found = LockedDirectory::take_over(leftover.path, why);
    auto journal = found ? Journal::open(leftover.path) : nullptr;
    if (!found)
      code = ErrorCode::exists;
    else
      why = journal ? difference(journal->identity(), *identity_) : "its journal is damaged";
    if (!why.empty()) {
      refused = fmt::format("\"{}\": {}", printable(leftover.path), why);
    } else if (!taken || journal->num_records() > journal_->num_records()) {
      taken = std::move(found);
      journal_ = std::move(journal);
    }
  }
  if (!taken && !refused.empty())
    throw Error(code, fmt::format("cannot resume {}{}", refused,
                                  code == ErrorCode::exists ? "" : " (discard removes what is unfinished)"));
  return taken;
}

// What an earlier run completed must be there as it was.
void OutputCheckpoint::check_resumed() {
  resumed_.resize(files_.names.size());
  uint64_t total = 0;
  for (size_t file = 0; file < files_.names.size(); ++file) {
    const uint64_t bytes = directory_->size_of(files_.names[file]).bytes;
    if (!journal_->contains(files_.names[file]) || journal_->find(files_.names[file]).at("bytes") != bytes)
      continue;
    resumed_[file] = 1;
    total += bytes;
  }
  ProgressPhase checking(reporter_, "check", total);
  for (size_t file = 0; file < files_.names.size(); ++file) {
    if (resumed_[file] == 0) continue;
    const std::string& name = files_.names[file];
    const auto input = InputFile::open_beneath(directory_->temporary_path(), name);
    if (journal_->find(name).at("hash") != hash_file(input, num_threads_, reporter_)) resumed_[file] = 0;
    checking.add(input.size());
  }
}

// The others learn of it from what leads, which has read the files.
void OutputCheckpoint::share_resumed() {
  resumed_.resize(files_.names.size());
  const std::string of_leader = team_.meet({resumed_.begin(), resumed_.end()}).front();
  resumed_.assign(of_leader.begin(), of_leader.end());
}

void OutputCheckpoint::deal(std::span<const uint64_t> num_bytes) {
  if (!team_.is_alone() && identity_) owner_ = deal_files(num_bytes, team_.size());
}

void OutputCheckpoint::gather_files() {
  if (team_.is_alone() || !identity_) return;
  if (!team_.leads()) directory_.reset();  // nothing may keep its files open when it is renamed
  const std::vector<std::string> lines = team_.meet(journal_ ? journal_->added() : "");
  if (!team_.leads()) return;
  for (const std::string& of_rank : lines) journal_->take(of_rank);
  gathered_.resize(files_.names.size());
  for (size_t file = 0; file < files_.names.size(); ++file) {
    if (is_resumed(file) || is_mine(file)) continue;
    HALFBYTE_CHECK(journal_->contains(files_.names[file]), bug, "process {} has not written \"{}\"",
                   owner_[file], printable(files_.names[file]));
    gathered_[file] = 1;
  }
}

bool OutputCheckpoint::take_resumed(size_t file, const FileContent& content) {
  if (!is_resumed(file) && !is_gathered(file)) return false;
  const std::string& name = files_.names[file];
  const std::vector<StoredTensor> tensors =
      read_safetensors_header(InputFile::open_beneath(directory_->temporary_path(), name), name).tensors;
  std::set<std::string_view> planned;
  for (const StoredTensor& tensor : content.tensors) planned.insert(tensor.name);
  const bool same =
      planned.size() == tensors.size() &&
      std::ranges::all_of(tensors, [&](const StoredTensor& own) { return planned.contains(own.name); });
  if (same) count_tensors(file, tensors);
  return same;
}

void OutputCheckpoint::add_record(const std::string& name, Json&& record) {
  if (!identity_) return;
  if (!journal_) begin_journal();
  journal_->add(name, std::move(record));
}

void OutputCheckpoint::begin_journal() {
  LockedDirectory& locked = directory_->locked();
  journal_ = std::make_unique<Journal>(locked.path(), *identity_, team_.rank());
  directory_->sync_names();
  locked.set_kept(true);
}

Json OutputCheckpoint::find_record(const std::string& name) const {
  const Journal* const journal = team_.leads() ? journal_.get() : earlier_.get();
  return journal ? journal->find(name) : Json();
}

Json OutputCheckpoint::records_of(size_t file) const { return find_record(files_.names[file]).at("weights"); }

void OutputCheckpoint::run(const std::function<void()>& work) {
  try {
    if (!team_.is_alone()) join_team();
    if (journal_ && team_.leads()) check_resumed();
    if (!team_.is_alone() && identity_) share_resumed();
    work();
  } catch (const Error& error) {
    give_up(team_.agreed(error));
  } catch (const Json::exception& error) {
    give_up(
        team_.agreed({ErrorCode::corrupt,
                      fmt::format("the journal of the unfinished output is damaged: {} (discard removes it)",
                                  error.what())}));
  }
}

void OutputCheckpoint::give_up(const Error& error) {
  if (!journal_ || !directory_ || !team_.leads()) throw error;
  LockedDirectory& locked = directory_->locked();
  if (!locked.is_kept()) throw error;  // the output has its name
  if (error.code() == ErrorCode::bad_input ||
      error.code() == ErrorCode::usage) {  // another run would fail again
    locked.set_kept(false);
    throw error;
  }
  if (!team_.is_alone()) try {
      if (auto all = Journal::open(locked.path())) journal_ = std::move(all);
    } catch (const Error&) {  // the first error says more
    }
  int64_t complete = 0;
  for (const std::string& name : files_.names) complete += journal_->contains(name) ? 1 : 0;
  if (complete == 0) throw error;
  throw Error(error.code(),
              fmt::format("{} ({} of {} files are complete and kept: a run that resumes goes on with them)",
                          error.what(), complete, files_.names.size()),
              error);
}

InputFile OutputCheckpoint::open_side_file(const std::string& name) const {
  const fs::path path = join(input_.path, name);
  return InputFile::open_beneath(path.parent_path().string(), path.filename().string());
}

int reserving_threads(uint64_t num_bytes, int num_threads) {
  constexpr uint64_t kMany = uint64_t{1} << 30;
  return num_bytes < kMany ? 1 : num_threads;
}

void OutputCheckpoint::reserve_bytes(std::span<const uint64_t> num_bytes) {
  std::vector<std::pair<std::string, uint64_t>> planned;
  for (size_t file = 0; file < num_bytes.size(); ++file)
    if (!is_resumed(file)) planned.emplace_back(files_.names[file], num_bytes[file]);
  for (const std::string& name : side_files_.copied) {
    planned.emplace_back(name, open_side_file(name).size());
    side_bytes_ += planned.back().second;
  }
  uint64_t missing = 0;
  for (const auto& [name, bytes] : planned)
    missing += bytes - std::min(bytes, directory_->size_of(name).allocated);
  // First, as it takes no time where there is too little, and is all that some file systems can do.
  directory_->check_space(missing, planned.size());
  const int threads = reserving_threads(missing, num_threads_);
  parallel_for(std::ssize(planned), 1, threads, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const auto& [name, bytes] = planned[static_cast<size_t>(i)];
      const OutputFile created(*directory_, name, bytes);
      reporter_.poll();
    }
  });
}

template <class Make>
TensorFile::TensorFile(size_t index, FileContent&& content, const Make& make)
    : index_(index), tensors_(std::move(content.tensors)) {
  const SafetensorsLayout layout = lay_out_safetensors(tensors_, content.metadata);
  for (const StoredTensor& tensor : tensors_) by_name_[tensor.name] = &tensor;
  file_ = make(layout.file_bytes);
  file_->write(0, std::as_bytes(std::span(layout.prefix)));
}

std::unique_ptr<TensorFile> TensorFile::unnamed(const std::string& directory, FileContent content) {
  const auto make = [&](uint64_t num_bytes) { return OutputFile::unnamed(directory, num_bytes); };
  return std::unique_ptr<TensorFile>(new TensorFile(0, std::move(content), make));
}

std::unique_ptr<TensorFile> OutputCheckpoint::begin_file(size_t index, FileContent content) {
  const auto make = [&](uint64_t num_bytes) {
    return directory_ ? std::make_unique<OutputFile>(*directory_, files_.names[index], num_bytes)
                      : std::make_unique<OutputFile>(output_, num_bytes, force_);
  };
  return std::unique_ptr<TensorFile>(new TensorFile(index, std::move(content), make));
}

void TensorFile::write(const StoredTensor& tensor, uint64_t offset, std::span<const std::byte> bytes) {
  HALFBYTE_CHECK(offset <= tensor.num_bytes && bytes.size() <= tensor.num_bytes - offset, bug,
                 "bytes [{}, {} + {}) are not within tensor \"{}\" of {} bytes", offset, offset, bytes.size(),
                 printable(tensor.name), tensor.num_bytes);
  file_->write(tensor.offset + offset, bytes);
}

void TensorFile::write(const StoredTensor& tensor, const StoredRange& range,
                       std::span<const std::byte> bytes) {
  if (!has_short_runs(range))
    return for_each_run(range, [&](uint64_t offset, uint64_t begin, uint64_t size) {
      write(tensor, offset, bytes.subspan(begin, size));
    });
  std::byte* whole = nullptr;
  {
    const std::lock_guard lock(mutex_);
    Assembly& assembly = assemblies_[&tensor];
    if (!assembly.bytes) {
      assembly.missing = tensor.num_bytes;
      assembly.bytes = std::make_unique_for_overwrite<std::byte[]>(tensor.num_bytes);
    }
    whole = assembly.bytes.get();
  }
  for_each_run(range, [&](uint64_t offset, uint64_t begin, uint64_t size) {
    HALFBYTE_CHECK(offset <= tensor.num_bytes && size <= tensor.num_bytes - offset, bug,
                   "bytes [{}, {} + {}) are not within tensor \"{}\" of {} bytes", offset, offset, size,
                   printable(tensor.name), tensor.num_bytes);
    std::memcpy(whole + offset, bytes.data() + begin, size);
  });
  std::unique_ptr<std::byte[]> complete;
  {
    const std::lock_guard lock(mutex_);
    Assembly& assembly = assemblies_.at(&tensor);
    assembly.missing -= bytes.size();
    if (assembly.missing > 0) return;
    complete = std::move(assembly.bytes);
    assemblies_.erase(&tensor);
  }
  write(tensor, 0, {complete.get(), tensor.num_bytes});
}

void TensorFile::sync(const std::function<void()>& poll) {
  HALFBYTE_CHECK(assemblies_.empty(), bug, "{} tensors of \"{}\" are not complete", assemblies_.size(),
                 printable(path()));
  file_->sync(poll);
}

void TensorFile::write_repeated(const StoredTensor& tensor, std::string_view content) {
  constexpr uint64_t kRunBytes = 64 * 1024;  // of a short content, written at once
  std::string run(content);
  while (!run.empty() && run.size() < std::min<uint64_t>(tensor.num_bytes, kRunBytes)) run += run;
  for (uint64_t offset = 0; offset < tensor.num_bytes; offset += run.size())
    write(tensor, offset,
          std::as_bytes(std::span(run)).first(std::min<uint64_t>(run.size(), tensor.num_bytes - offset)));
}

void OutputCheckpoint::sync(TensorFile& file) {
  uint64_t num_bytes = 0;
  for (const StoredTensor& tensor : file.tensors_) num_bytes += tensor.num_bytes;
  reporter_.report({"sync", num_bytes, num_bytes});
  file.sync([&] { reporter_.poll(); });
}

void OutputCheckpoint::check_sources(size_t file) const {
  for (const size_t source : files_.sources[file]) input_.files[source].input.check_unchanged();
}

void OutputCheckpoint::verify(std::span<const TensorFile* const> files,
                              std::vector<std::vector<VerifyItem>> items, int num_threads,
                              ProgressPhase& progress) const {
  std::vector<VerifyFile> written;
  for (size_t i = 0; i < files.size(); ++i)
    written.push_back({files[i]->file_->temporary_path(), std::move(items[i])});
  try {
    verify_files(input_, written, num_threads, progress);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::verify)  // a change is why
      for (const TensorFile* file : files) check_sources(file->index_);
    throw;
  }
}

void OutputCheckpoint::commit_file(std::unique_ptr<TensorFile> file, Json* records) {
  if (!directory_) return static_cast<void>(single_ = std::move(file));
  check_sources(file->index_);
  file->file_->commit();
  count_tensors(file->index_, file->tensors_);
  if (!identity_) return;
  const std::string& name = files_.names[file->index_];
  file.reset();
  const auto complete = InputFile::open_beneath(directory_->temporary_path(), name);
  add_record(name, json_object({{"bytes", complete.size()},
                                {"hash", hash_file(complete, num_threads_, reporter_)},
                                {"weights", records ? std::move(*records) : Json::array()}}));
}

void OutputCheckpoint::count_tensors(size_t file, std::span<const StoredTensor> tensors) {
  const std::lock_guard lock(mutex_);
  for (const StoredTensor& tensor : tensors) {
    HALFBYTE_CHECK(weight_map_.emplace(tensor.name, files_.names[file]).second, bad_input,
                   "tensor \"{}\" would be written twice", printable(tensor.name));
    total_bytes_ += tensor.num_bytes;
  }
}

std::string OutputCheckpoint::index_text() const {
  std::vector<std::pair<std::string_view, std::string_view>> files;
  files.reserve(weight_map_.size());
  for (const auto& [tensor, file] : weight_map_) files.emplace_back(tensor, file);
  return shard_index_text(input_.index, total_bytes_, files);
}

void OutputCheckpoint::write_text(const std::string& name, const std::string& text) {
  OutputFile file(*directory_, name, text.size());
  file.write(0, std::as_bytes(std::span(text)));
  file.commit();
}

void OutputCheckpoint::copy_file(const std::string& name, ProgressPhase& progress) {
  const InputFile from = open_side_file(name);
  OutputFile to(*directory_, name, from.size());
  constexpr int64_t kPart = int64_t{1} << 20;  // the system makes who fills its cache wait in each write
  Buffer buffer;
  for (uint64_t offset = 0; offset < from.size();) {
    const uint64_t count = std::min<uint64_t>(from.size() - offset, kPart);
    const std::span<std::byte> bytes(buffer.reserve(kPart), count);
    from.read(offset, bytes);
    to.write(offset, bytes);
    offset += count;
    progress.add(count);
  }
  from.check_unchanged();
  to.sync([&] { reporter_.poll(); });
  to.commit();
}

void OutputCheckpoint::finish(const std::string& config, const std::map<std::string, std::string>& texts) {
  if (team_.leads()) finish_alone(config, texts);
}

void OutputCheckpoint::finish_alone(const std::string& config,
                                    const std::map<std::string, std::string>& texts) {
  if (!directory_) {
    reporter_.ask();
    check_sources(single_->index_);
    single_->file_->commit();
    return;
  }
  ProgressPhase copying(reporter_, "copy", side_bytes_);
  for (const std::string& name : side_files_.copied) copy_file(name, copying);
  if (files_.has_index) write_text(kIndexFile, index_text());
  for (const auto& [name, text] : texts) write_text(name, text);
  if (!config.empty()) write_text(kConfigFile, config);  // last: it says what the rest is
  directory_->sync();
  reporter_.ask();
  if (!journal_ || !force_) return directory_->commit();
  // The older output is going to lie where this one does: no run may take it for what is unfinished.
  try {
    directory_->commit([&] { journal_->hide(); });
  } catch (...) {
    LockedDirectory& locked = directory_->locked();
    if (locked.is_kept() && !journal_->show()) locked.set_kept(false);
    throw;
  }
}

}  // namespace halfbyte::io
