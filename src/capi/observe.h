// Configurations of observers and scales from C.
#pragma once

#include "capi/support.h"
#include "halfbyte/observe.hpp"

namespace halfbyte::capi {

halfbyte_qparams_config to_c(const QParamsConfig& config);
halfbyte_observer_config to_c(const ObserverConfig& config);  // qparams: NULL, the defaults
// NULL: the defaults.
QParamsConfig qparams_config_of(const halfbyte_qparams_config* given, const char* name);
ObserverConfig observer_config_of(const halfbyte_observer_config* given, const char* name);

}  // namespace halfbyte::capi
