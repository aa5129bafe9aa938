// The command line tool: parses, runs one subcommand, prints, and turns errors into exit codes.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string_view>

#include "command.h"
#include "halfbyte/error.hpp"
#include "halfbyte/output.hpp"
#include "halfbyte/system.hpp"
#include "output.h"
#include "process_group.h"
#include "progress.h"

namespace halfbyte::cli {

namespace {

constexpr int kSchemaVersion = 1;

// A file opened later must not become a standard stream by accident: messages would be written into it.
void open_missing_standard_streams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) == -1) ::open("/dev/null", O_RDWR);
}

struct Failure {
  ErrorCode code = ErrorCode::ok;
  std::string message;
};

// Code of others that promises not to throw ends here without memory: CLI11, as it reads the arguments.
[[noreturn]] void terminate() noexcept {
  try {
    if (std::current_exception()) throw;
  } catch (const std::bad_alloc&) {
    write_stderr("halfbyte: error: out of memory\n");
    ::_exit(static_cast<int>(ErrorCode::no_memory));
  } catch (...) {
  }
  std::abort();
}

// Runs `action`; what it throws is returned.
template <class Action>
std::optional<Failure> attempt(const Action& action) {
  try {
    action();
    return std::nullopt;
  } catch (const Error& error) {
    return Failure{error.code(), error.what()};
  } catch (const std::bad_alloc&) {
    return Failure{ErrorCode::no_memory, "out of memory"};
  } catch (const std::exception& error) {
    return Failure{ErrorCode::bug, fmt::format("internal error: {}", error.what())};
  }
}

// Where there is no memory for one text, in pieces.
void print_failure(const Failure& failure, const std::string& command) {
  const auto write = [&](const auto& write_piece) {
    for (const std::string_view piece :
         {std::string_view("halfbyte: error: "), std::string_view(failure.message), std::string_view("\n")})
      write_piece(piece);
    if (failure.code != ErrorCode::usage) return;
    for (const char* const piece :
         {"Try 'halfbyte ", command.c_str(), command.empty() ? "" : " ", "--help'.\n"})
      write_piece(piece);
  };
  try {
    std::string text;
    write([&](std::string_view piece) { text += piece; });
    write_stderr(text);
  } catch (const std::bad_alloc&) {
    write(write_stderr);
  }
}

// Removes what runs that were killed left beside what this one writes, and says so.
void remove_leftovers(const Command& command, Json& document) {
  std::vector<std::string> paths = {command.output};
  if (command.json_path != "-") paths.push_back(command.json_path);
  for (const std::string& path : paths) {
    if (path.empty()) continue;
    const bool discards = command.unfinished == Unfinished::discard;
    for (const Leftover& leftover : halfbyte::remove_leftovers(path, discards)) {
      if (leftover.unfinished && command.unfinished == Unfinished::resume)
        continue;  // the command takes it up
      const bool removed = leftover.why_kept.empty();
      write_stderr(fmt::format("halfbyte: {} \"{}\", which an earlier run left{}{}\n",
                               removed ? "removed" : "kept", printable(leftover.path), removed ? "" : ": ",
                               leftover.why_kept));
      if (leftover.unfinished && !removed && !discards)
        write_stderr("halfbyte: --resume goes on with it, --discard removes it\n");
      document["leftovers"].push_back({{"path", leftover.path},
                                       {"removed", removed},
                                       {"why_kept", leftover.why_kept},
                                       {"unfinished", leftover.unfinished}});
    }
  }
}

// Before the work: what can be known to fail.
void prepare(const Command& command, Json& document, std::optional<ReportFile>& json_file) {
  remove_leftovers(command, document);
  if (command.json_path.empty() || command.json_path == "-") return;
  // Empty where that cannot be told: to open it says why.
  const auto place_of = [](const std::string& path) {
    std::error_code error;
    const std::filesystem::path whole = std::filesystem::absolute(path, error);
    return error ? std::filesystem::path() : std::filesystem::weakly_canonical(whole, error);
  };
  const std::filesystem::path place = place_of(command.json_path);
  if (!command.output.empty() && !place.empty() && place == place_of(command.output))
    throw Error(ErrorCode::usage,
                fmt::format("--json: \"{}\" is the output, too", printable(command.json_path)));
  // The report of the run that is gone on with makes room.
  const bool resumes = command.unfinished == Unfinished::resume;
  const bool force = command.force || (resumes && is_failed_report(command.json_path, command.name));
  json_file.emplace("--json", command.json_path, force);
}

int run(Command& command) {
  Json document = {{"schema_version", kSchemaVersion}, {"command", command.name}, {"ok", true}};
  std::string text;
  std::optional<ReportFile> json_file;
  bool leads = true;  // what others find is of no interest
  const auto failure = attempt([&] {
    const int count = num_launched_processes();
    if (count > 1 && command.takes_processes) {
      command.group = process_group();
      leads = command.group->rank() == 0;
    } else if (count > 1 && !command.output.empty()) {  // each would do the whole work
      throw Error(ErrorCode::usage,
                  fmt::format("{} runs in one process, and {} were started (HALFBYTE_MPI= says "
                              "that this one is alone)",
                              command.name, count));
    }
    if (leads) before_all(command.group.get(), [&] { prepare(command, document, json_file); });
    command.run(text, document);
  });
  if (!leads) {
    // An error of all is said once.
    if (failure && failure->code == ErrorCode::bug) print_failure(*failure, command.name);
    command.group.reset();
    return static_cast<int>(failure ? failure->code : ErrorCode::ok);
  }
  if (failure) {
    document["ok"] = false;
    document["error"] = {{"code", to_string(failure->code)}, {"message", failure->message}};
  }
  const auto dump = [](const Json& value, int indent) {
    return value.dump(indent, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) + "\n";
  };
  const auto json = [&] {
    if (!command.is_json_lines) return dump(document, 2);
    Json head = document;
    head.erase("rows");
    std::string lines = dump(head, -1);
    if (document.contains("rows"))
      for (const Json& row : document["rows"]) lines += dump(row, -1);
    return lines;
  };
  // Each on its own: where one cannot be written, the other still is.
  const auto json_failure = attempt([&] {
    if (json_file) json_file->commit(json());
  });
  const auto stdout_failure = attempt([&] { write_stdout(command.json_path == "-" ? json() : text); });

  ErrorCode exit_code = ErrorCode::ok;
  for (const auto& problem : {failure, json_failure, stdout_failure}) {
    if (!problem) continue;
    print_failure(*problem, command.name);
    if (exit_code == ErrorCode::ok) exit_code = problem->code;
  }
  command.group.reset();
  return static_cast<int>(exit_code);
}

int parse_and_run(int argc, char** argv) {
  CLI::App app("Low-bit weights: quantizes, dequantizes and inspects checkpoints.", "halfbyte");
  app.set_version_flag("--version", fmt::format("halfbyte {}", system_info().version));
  app.require_subcommand(0, 1);
  Command command;
  add_quantize_command(app, command);
  add_dequantize_command(app, command);
  add_convert_command(app, command);
  add_inspect_command(app, command);
  add_compare_command(app, command);
  add_verify_command(app, command);
  add_repair_command(app, command);
  add_ptx_command(app, command);
  add_precompile_command(app, command);
  add_bench_command(app, command);
  add_doctor_command(app, command);
  try {
    app.parse(argc, argv);
    // Not left to the parser, which would say this of a misspelled subcommand too.
    if (app.get_subcommands().empty()) throw CLI::RequiredError("A subcommand");
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {  // --help, --version
      std::ostringstream text;
      app.exit(error, text, text);
      write_stdout(text.str());
      return 0;
    }
    const auto subcommands = app.get_subcommands();
    print_failure({ErrorCode::usage, printable(error.what())},
                  subcommands.empty() ? "" : subcommands.back()->get_name());
    return static_cast<int>(ErrorCode::usage);
  }
  return run(command);
}

}  // namespace

}  // namespace halfbyte::cli

int main(int argc, char** argv) {
  using namespace halfbyte::cli;
  std::set_terminate(terminate);
  open_missing_standard_streams();
  install_signal_handlers();
  int exit_code = 0;
  if (const auto failure = attempt([&] { exit_code = parse_and_run(argc, argv); })) {
    print_failure(*failure, "");
    return static_cast<int>(failure->code);
  }
  return exit_code;
}
