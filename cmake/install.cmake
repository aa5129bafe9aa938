# What `cmake --install` lays out: library, headers, tool, CMake package and pkg-config file. The
# component "bundle", installed on request, adds the shared third-party libraries beside them:
#   cmake --install build/release --prefix DIR && cmake --install build/release --prefix DIR --component bundle
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/halfbyte)
get_target_property(library_type halfbyte TYPE)  # decides what its users must find, see halfbyteConfig.cmake.in

install(TARGETS halfbyte EXPORT halfbyteTargets)
install(DIRECTORY include/halfbyte ${PROJECT_BINARY_DIR}/include/halfbyte DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT halfbyteTargets NAMESPACE halfbyte:: DESTINATION ${package_dir})
if(HALFBYTE_CLI)
  install(TARGETS halfbyte_cli)
endif()

configure_package_config_file(cmake/halfbyteConfig.cmake.in halfbyteConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(halfbyteConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/halfbyteConfig.cmake
  ${PROJECT_BINARY_DIR}/halfbyteConfigVersion.cmake
  DESTINATION ${package_dir})

# A static library leaves its libraries to be linked by its user.
set(pc_requires)
set(pc_libs)
if(library_type STREQUAL "STATIC_LIBRARY")
  set(pc_requires "fmt libhwy tbb")
  set(pc_libs " -lstdc++ -lm")
endif()
file(RELATIVE_PATH pc_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
configure_file(cmake/halfbyte.pc.in halfbyte.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/halfbyte.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

install(IMPORTED_RUNTIME_ARTIFACTS fmt::fmt hwy::hwy TBB::tbb COMPONENT bundle EXCLUDE_FROM_ALL)
