// Descriptions of plain kernels as JSON.
#include <nlohmann/json.hpp>

#include "halfbyte/kernels.hpp"

namespace halfbyte {

using Json = nlohmann::ordered_json;

int64_t KernelParameter::alignment() const {
  for (const auto& [end, bytes] : {std::pair("8", 1), std::pair("16", 2), std::pair("64", 8)})
    if (type.ends_with(end)) return bytes;
  return 4;
}

std::string to_json(const KernelDescription& description) {
  Json config = Json::object(), parameters = Json::array();
  for (const auto& [key, value] : description.config) config[key] = value;
  for (const KernelParameter& parameter : description.parameters) {
    Json json = {{"name", parameter.name},
                 {"kind", parameter.is_pointer() ? "pointer" : "number"},
                 {"type", parameter.type},
                 {"alignment", parameter.alignment()}};
    if (parameter.is_pointer()) {
      json["elements"] = parameter.elements;
      json["access"] = parameter.access;
      json["optional"] = parameter.optional;
    }
    json["description"] = parameter.description;
    parameters.push_back(std::move(json));
  }
  return Json{{"op", description.op},
              {"kernel", description.kernel},
              {"config", std::move(config)},
              {"parameters", std::move(parameters)},
              {"grid", {description.grid, "1", "1"}},
              {"block", {std::to_string(description.block), "1", "1"}},
              {"shared_bytes", std::to_string(description.shared_bytes)}}
             .dump(2) +
         "\n";
}

}  // namespace halfbyte
