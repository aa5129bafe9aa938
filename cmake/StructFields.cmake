# halfbyte_struct_fields(HEADER OUTPUT)
#
# writes OUTPUT, for capi/support.h: of each structure of HEADER that begins with struct_size, a specialisation of
# cuts_field, which knows where its fields lie.
function(halfbyte_struct_fields header output)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${header})
  file(READ ${header} text)
  string(REGEX REPLACE "/\\*([^*]|\\*+[^*/])*\\*+/" "" text "${text}")  # comments
  string(REGEX REPLACE "\\[[0-9]+\\]" "" text "${text}")
  string(REPLACE ";" "|" text "${text}")  # which ends an element of a list
  string(REGEX MATCHALL "typedef struct [a-z0-9_]+ {[^}]*}" structures "${text}")
  set(result "// Written by cmake/StructFields.cmake.\n")
  foreach(structure IN LISTS structures)
    string(REGEX MATCH "struct ([a-z0-9_]+)" name "${structure}")
    set(name ${CMAKE_MATCH_1})
    string(REGEX MATCHALL "[a-z0-9_]+[|,]" declarators "${structure}")
    set(fields "")
    foreach(declarator IN LISTS declarators)
      string(REGEX REPLACE "(.*)." " HALFBYTE_CUTS(\\1)" field "${declarator}")
      string(APPEND fields "${field}")
    endforeach()
    if(fields MATCHES "^ HALFBYTE_CUTS\\(struct_size\\)")
      string(APPEND result "HALFBYTE_STRUCT(${name},${fields})\n")
    endif()
  endforeach()
  file(CONFIGURE OUTPUT ${output} CONTENT "${result}" @ONLY)  # leaves the file alone where nothing changes
endfunction()
