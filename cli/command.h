// What main.cc and the subcommands share: each subcommand declares its options on the parser and
// leaves a function to run.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "halfbyte/checkpoint.hpp"

namespace CLI {
class App;
}

namespace halfbyte::cli {

using Json = nlohmann::ordered_json;

// The chosen subcommand.
struct Command {
  std::string name;
  std::string json_path;                     // --json; empty: none; "-": stdout, instead of the text
  bool force = false;                        // --force
  std::string output;                        // what it writes besides; empty: nothing
  Unfinished unfinished = Unfinished::keep;  // --resume, --discard
  bool takes_processes = false;              // may be run by several processes, which `group` connects
  std::shared_ptr<ProcessGroup> group;       // null: there is one
  // The report is a line of JSON for the run, then one for each of the document's "rows".
  bool is_json_lines = false;
  // Fills in the text for people and the JSON document. What it has filled in before it throws is
  // printed as well.
  std::function<void(std::string& text, Json& document)> run;
};

// Each adds one subcommand; parsing it sets `command`.
void add_quantize_command(CLI::App& app, Command& command);
void add_convert_command(CLI::App& app, Command& command);
void add_dequantize_command(CLI::App& app, Command& command);
void add_inspect_command(CLI::App& app, Command& command);
void add_compare_command(CLI::App& app, Command& command);
void add_ptx_command(CLI::App& app, Command& command);
void add_precompile_command(CLI::App& app, Command& command);
void add_bench_command(CLI::App& app, Command& command);
void add_verify_command(CLI::App& app, Command& command);
void add_repair_command(CLI::App& app, Command& command);
void add_doctor_command(CLI::App& app, Command& command);

}  // namespace halfbyte::cli
