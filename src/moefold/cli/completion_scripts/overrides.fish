
function _moefold_overrides
  set -l word (commandline -ct)
  switch $word
@VALUES@
    case '*'
      printf '%s\n' @KEYS@
      test -n "$word"; and __fish_complete_path $word
  end
end
