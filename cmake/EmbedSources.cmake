# The device sources as text in the library: NVRTC compiles them at run time.
#
#   halfbyte_embed_sources(OUTPUT)
#
# writes OUTPUT, which defines halfbyte::cuda::embedded_files() (src/cuda/embedded.h), whenever a source changes,
# appears or goes.
if(NOT CMAKE_SCRIPT_MODE_FILE)
  set(embed_script ${CMAKE_CURRENT_LIST_FILE})

  function(halfbyte_embed_sources output)
    set(root ${PROJECT_SOURCE_DIR}/src)
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS RELATIVE ${root}
      ${root}/*.cu ${root}/*.cuh ${root}/*_args.h ${root}/formats/*.h)
    set(depends ${sources})
    list(TRANSFORM depends PREPEND ${root}/)
    add_custom_command(OUTPUT ${output}
      COMMAND ${CMAKE_COMMAND} -P ${embed_script} ${output} ${root} ${sources}
      DEPENDS ${embed_script} ${depends}
      COMMENT "Embedding the device sources"
      VERBATIM)
  endfunction()
  return()
endif()

# cmake -P EmbedSources.cmake OUTPUT ROOT SOURCE...
math(EXPR last "${CMAKE_ARGC} - 1")
set(names)
foreach(i RANGE 5 ${last})
  list(APPEND names ${CMAKE_ARGV${i}})
endforeach()
list(SORT names)  # by bytes, as std::string_view compares

set(text "// Written by cmake/EmbedSources.cmake.\n#include \"cuda/embedded.h\"\n\n")
string(APPEND text "namespace halfbyte::cuda {\n\nusing namespace std::string_view_literals;\n\n")
string(APPEND text "std::span<const EmbeddedFile> embedded_files() {\n  static constexpr EmbeddedFile files[] = {\n")
foreach(name IN LISTS names)
  file(READ ${CMAKE_ARGV4}/${name} content)
  string(FIND "${content}" ")embedded\"" delimiter)
  if(NOT delimiter EQUAL -1)
    message(FATAL_ERROR "${name} contains )embedded\", which ends a raw string here")
  endif()
  string(APPEND text "{\"${name}\", R\"embedded(${content})embedded\"sv},\n")
endforeach()
string(APPEND text "  };\n  return files;\n}\n\n}  // namespace halfbyte::cuda\n")
file(WRITE ${CMAKE_ARGV3} "${text}")
